"""The two errors that a user may see: one clear sentence each, turned into an exit code by the command line."""


class InputError(ValueError):
    """Bad input or wrong usage (exit code 2): names the file, tensor or option, what was found, and what to do."""


class RunError(RuntimeError):
    """The run itself failed (exit code 1): a full disk, a lost network, a proof that does not hold."""
