"""The errors that are a user's to mend: one sentence that names the thing and the mend."""


class UserError(Exception):
    """Wrong input. Commands print `error: <sentence>` and exit with code 2, without a traceback."""


class ConfigError(UserError, ValueError):
    """A setting is out of range or contradicts another one."""


class DataError(UserError, ValueError):
    """A file, data set or row can't be used."""


class ModelError(UserError, ValueError):
    """A model or tokenizer directory can't be used."""


def require(condition: bool, sentence: str) -> None:  # noqa: FBT001
    """Raise `ConfigError(sentence)` unless `condition` holds."""
    if not condition:
        raise ConfigError(sentence)
