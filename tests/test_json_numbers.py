"""Numbers of records: the same for any number of threads, and JSON."""

import json
import math

from ptq.files.json_numbers import six_digits


def test_six_digits():
    found = six_digits({"a": [1 / 3, (math.nan, 2.0)], "b": {"c": -math.inf, "d": 12345678.9}, "e": "x", "f": 1234567})
    assert found == {"a": [0.333333, (None, 2.0)], "b": {"c": None, "d": 12345700.0}, "e": "x", "f": 1234567}
    assert json.dumps(found, allow_nan=False)
    assert six_digits(None) is None and six_digits(True) is True
