"""Files of settings: YAML (or JSON, which is YAML); a name twice in one section is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.settings.build import Layer
from pipeline.system.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a name that a section has twice."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002
    ) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value != "<<" and key.value in lines:
                raise ConfigError(
                    f"has {key.value} twice, in lines {lines[key.value]} and {line}; keep one of"
                    " them"
                )
            lines[key.value if isinstance(key, yaml.ScalarNode) else ""] = line
        return super().construct_mapping(node, deep)


def read_settings(path: Path) -> Layer:
    """The settings in a file, nested as in the file; an empty file has none.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, a name twice, or not a mapping of names to
            values; the sentence names the file and, where there is one, the line.
    """
    try:
        settings = yaml.load(path.read_bytes().decode("utf-8-sig"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"--config {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"--config {path} is not UTF-8 text in line {line}; save the file as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML{where}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply to be settings") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path} {error}") from None
    except ValueError as error:  # a date such as 2026-99-99
        raise ConfigError(f"--config {path} has a value that can't be read: {error}") from None
    if not isinstance(settings or {}, dict):
        raise ConfigError(f"--config {path} must hold settings, `name: value`; it holds {settings}")
    _check_names(settings or {}, path)
    return Layer(settings or {}, str(path), is_file=True)


def _check_names(settings: Mapping[Any, Any], path: Path, section: str = "") -> None:
    for name, value in settings.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"{section}{name} in --config {path} is not text, and names of settings are;"
                " settings are `name: value`"
            )
        if isinstance(value, Mapping):
            _check_names(value, path, f"{section}{name}.")
