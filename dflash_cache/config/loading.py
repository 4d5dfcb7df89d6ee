"""From a YAML file and `--set a.b=c` overrides to a checked `Config`; and back to a file.

A wrong key or value ends in one sentence that names the file, the key and, for a misspelt key, the nearest
one that exists.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dflash_cache.config.settings import Config
from dflash_cache.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides` ("train.seed=3", values in YAML), and validate.

    Raises ConfigError on a missing or malformed file, an unknown key, or a value out of range.
    """
    return validate_config(apply_overrides(read_yaml(path), overrides), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises ConfigError if there is no such file, or no keys are in it."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {path}; name an existing YAML file.") from None
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The configuration {path} is not UTF-8 text ({error.reason}); save it as UTF-8.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The configuration {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"The configuration {path} must hold keys and values at its top, not {_kind_of(tree)}.")
    return tree


def validate_config(tree: Mapping[str, Any], source: str) -> Config:
    """Build a Config from plain values; `source` names them in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"The configuration {source} is wrong: {describe_errors(error)}") from None


def describe_errors(error: ValidationError, root: type[BaseModel] = Config) -> str:
    """All that pydantic found wrong with a `root`, in one sentence."""
    return end_sentence("; ".join(_describe(detail, root) for detail in error.errors(include_url=False)))


def dump_config(config: Config) -> str:
    """The full resolved configuration as YAML, in the order of the settings."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def end_sentence(text: str) -> str:
    """The text with a full stop, unless it ends in a mark of its own."""
    return text if text.endswith(("?", "!", ".")) else f"{text}."


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set each "train.seed=3" in plain values, in place; returns them. Raises ConfigError."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(key.strip().split(".")):
            raise ConfigError(f"--set {override!r} is not of the form section.key=value.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {override!r}: the value is not valid YAML; quote it.") from None
        set_value(tree, key.strip(), value, f"--set {override!r}")
    return tree


def set_value(tree: dict[str, Any], key: str, value: object, source: str) -> None:
    """Set `section.name` in plain values, making the section; `source` names the change in errors (ConfigError)."""
    *sections, name = key.split(".")
    node = tree
    for section in sections:
        child = node.get(section)
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{source}: {section} holds {_kind_of(child)}, not a section.")
        node = child
    node[name] = value


def _describe(detail: ErrorDetails, root: type[BaseModel]) -> str:
    location = [str(part) for part in detail["loc"]]
    name = ".".join(location)
    if detail["type"] == "extra_forbidden":
        return f"there is no setting {name}{_suggestion(location, root)}"
    if detail["type"] == "missing":
        return f"{name} is missing"
    message = _plain_message(detail)
    return f"{name}: {message} (found {detail['input']!r})" if name else message


def _plain_message(detail: ErrorDetails) -> str:
    """What pydantic says, in the words of YAML instead of Python's."""
    if detail["type"] in ("tuple_type", "list_type"):
        return "must be a list"
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a section with keys of its own"
    if detail["type"] == "too_short" and not detail["input"]:
        return "must not be empty"
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _suggestion(location: Sequence[str], root: type[BaseModel]) -> str:
    section = _section_at(location[:-1], root)
    if section is None:
        return ""
    known = list(section.model_fields)
    elsewhere = [
        f"{name}.{location[-1]}"
        for name in root.model_fields
        if (part := _section_at([name], root)) is not None and location[-1] in part.model_fields
    ]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {'.'.join([*location[:-1], close[0]])}?"
    return f"; known here: {', '.join(known)}"


def _section_at(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    section = root
    for part in path:
        field = section.model_fields.get(part)
        if field is None:
            return None
        candidates = [field.annotation, *get_args(field.annotation)]
        nested = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not nested:
            return None
        section = nested[0]
    return section


def _kind_of(value: object) -> str:
    names = {
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a number",
        bool: "a truth value",
        dict: "a section",
    }
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
