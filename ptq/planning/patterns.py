"""Which linears are meant by the options that name some by pattern: `skip` and `widths` of a recipe."""

from collections.abc import Sequence
from fnmatch import fnmatch

from ptq.errors import InputError
from ptq.recipe import Recipe


def skipped(names: Sequence[str], recipe: Recipe) -> set[str]:
    """Which of the linears that may be rounded `recipe.skip` leaves alone. Raises InputError for a pattern that matches
    none of them, and for one of `widths` where others decide on every linear that it matches."""
    patterns = [("--skip", pattern, pattern) for pattern in recipe.skip]
    patterns += [(recipe.width_option, entry, entry.partition("=")[0]) for entry in recipe.widths]
    left = set(names)
    for option, entry, pattern in patterns:
        matched = {name for name in names if fnmatch(name, pattern)}
        if not matched:
            near = (f"*{pattern.strip('*')}", f"*{pattern.strip('*')}*")
            if meant := next((other for other in near if any(fnmatch(name, other) for name in names)), None):
                raise InputError(
                    f"{option} {entry!r} matches no linear: a pattern is for whole names; is "
                    f"{meant + entry.removeprefix(pattern)!r} meant?"
                )
            raise InputError(
                f"{option} {entry!r} matches no linear that would be quantised; names look like {names[0]} "
                "(--embedding-bits decides on embedding and head)"
            )
        if option != "--skip" and not matched & left:
            raise InputError(
                f"{option} {entry!r} does nothing: --skip, or another {option} before it, has every linear that it "
                "matches"
            )
        left -= matched
    return {name for name in names if any(fnmatch(name, pattern) for pattern in recipe.skip)}
