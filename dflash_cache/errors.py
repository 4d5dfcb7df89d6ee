"""Everything a user can get wrong, as one exception tree.

Each message is one or two sentences: what is wrong, where, and what to do about it. The command line
shows the message alone and exits with code 2; a traceback therefore always means a fault of ours.

    DFlashError
    ├── ConfigError    the configuration: an unknown key, an impossible value, a missing file
    ├── DataError      the conversations: a malformed line, a record without messages
    ├── TargetError    the target: not found, not supported, no chat template
    ├── CacheError     the cache: missing, unfinished, damaged, made from something else
    │   └── WriteError     a file could not be written: no room, a quota, failing storage
    └── RunError       a training run: a checkpoint of another run, a diverged loss
"""


class DFlashError(Exception):
    """Base of every error that a user can cause and mend."""


class ConfigError(DFlashError):
    """The configuration is wrong."""


class DataError(DFlashError):
    """The conversations are wrong."""


class TargetError(DFlashError):
    """The target cannot be used."""


class CacheError(DFlashError):
    """The cache is missing, unfinished, damaged, or belongs to something else."""


class WriteError(CacheError):
    """A file could not be written; what was written before it stands."""


class RunError(DFlashError):
    """The training run cannot go on, or its folder belongs to another run."""
