"""The schema as a table of dotted paths, which error messages and --help read."""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from train.config.schema import Config

NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
BOUNDS = {"gt": "> {:_}", "ge": ">= {:_}", "lt": "< {:_}", "le": "<= {:_}", "multiple_of": "a multiple of {:_}"}
UNIONS = {Union, types.UnionType}


@dataclass(frozen=True)
class Known:
    """One known path."""

    path: str
    expected: str
    choices: tuple[str, ...]
    default: Any
    required: bool
    doc: str
    tag: str | None  # the field that tells the variants of a union apart
    section: bool
    variants: tuple[str, ...] = ()  # the variants that have the field, where not all of the union do
    entries: bool = False  # whether it is a list of sections, whose fields are those of one entry
    list_path: str = ""  # the list that the field belongs to, if any


@cache
def known_fields() -> Mapping[str, Known]:
    """Lists all paths of the schema, sections included, in its order; one entry for the variants of a union."""
    table: dict[str, Known] = {}
    for _, known in _walk(Config, ""):
        table[known.path] = _merged(table[known.path], known) if known.path in table else known
    for known in list(table.values()):
        if known.tag is not None and not known.entries:
            path = f"{known.path}.{known.tag}"
            default = known.default
            table[path] = replace(
                table[path], required=False, default=getattr(default, known.tag, table[path].choices[0])
            )
    return table


@cache
def variant_fields() -> Mapping[tuple[str, str], Known]:
    """Lists the fields of each variant of a union by path and variant: their own default, range and meaning."""
    return {(known.path, variant): known for variant, known in _walk(Config, "") if variant}


def find_field(path: str) -> tuple[Known, list[str]] | None:
    """Returns the field of a path, and the keys that lead there; or None.

    A path may go on with a name of the user: `data.arguments.highest` is an entry of `data.arguments`.
    """
    table = known_fields()
    if path in table:
        return table[path], path.split(".")
    for field in table.values():
        name = path.removeprefix(f"{field.path}.")
        if field.expected.startswith("a mapping") and not field.section and name not in (path, ""):
            return field, [*field.path.split("."), name]
    return None


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Describes in words what an annotation allows."""
    spoken = [item for item in metadata if isinstance(item, str)]
    if spoken:
        return spoken[0]
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return describe(arguments[0], (*arguments[1:], *metadata))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(choice) for choice in arguments)
    if origin in UNIONS:
        allowed = [describe(item, metadata) for item in arguments if item is not type(None)]
        return " or ".join([*allowed, "null"] if type(None) in arguments else allowed[:1])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(annotation.model_fields)}"
    return " ".join([NAMES[annotation], " and ".join(_bounds(metadata))]).strip()


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(tuple(item.metadata))
        for name, template in BOUNDS.items():
            if hasattr(item, name):
                yield template.format(getattr(item, name))


def _walk(model: type[BaseModel], prefix: str, variant: str = "", list_path: str = "") -> Iterator[tuple[str, Known]]:
    """Yields each field below a model, with the variant of a union that it belongs to."""
    for name, info in model.model_fields.items():
        path = prefix + name
        entry = _entry(info.annotation)
        annotation, field = (info.annotation, info) if entry is None else entry
        models = _models(annotation)
        tag = field.discriminator if isinstance(field.discriminator, str) else None
        yield (
            variant,
            Known(
                path=path,
                expected=describe(info.annotation, tuple(info.metadata)),
                choices=_choices(info.annotation) or _suggestions(info.metadata),
                default=info.get_default(),
                required=info.is_required(),
                doc=" ".join((info.description or _inherited_doc(model, name)).split()),
                tag=tag,
                section=bool(models),
                variants=(variant,) if variant else (),
                entries=entry is not None,
                list_path=list_path,
            ),
        )
        for inner in models:
            chosen = str(get_args(inner.model_fields[tag].annotation)[0]) if tag else variant
            yield from _walk(inner, f"{path}.", chosen, path if entry is not None else list_path)


def _inherited_doc(model: type[BaseModel], name: str) -> str:
    """Returns the meaning that the family of a variant gives a field, such as the name that tells variants apart."""
    families = [base for base in model.__mro__[1:] if issubclass(base, BaseModel) and name in base.model_fields]
    return next((doc for base in families if (doc := base.model_fields[name].description)), "")


def _entry(annotation: Any) -> tuple[Any, FieldInfo] | None:
    """Returns the annotation of an entry of a list of sections, and how its variants are told apart."""
    if get_origin(annotation) is not tuple or get_origin(get_args(annotation)[0]) is not Annotated:
        return None
    union, *metadata = get_args(get_args(annotation)[0])
    field = next((item for item in metadata if isinstance(item, FieldInfo) and item.discriminator), None)
    return None if field is None else (union, field)


def _models(annotation: Any) -> list[type[BaseModel]]:
    options = get_args(annotation) if get_origin(annotation) in UNIONS else (annotation,)
    return [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _choices(annotation: Any) -> tuple[str, ...]:
    """Returns the literal names that an annotation allows, also as entries of a tuple."""
    if get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    return tuple(choice for item in get_args(annotation) for choice in _choices(item))


def _suggestions(metadata: Iterable[Any]) -> tuple[str, ...]:
    """Returns the names that are suggested for a text that others may be, too: a tuple in the metadata."""
    return next((item for item in metadata if isinstance(item, tuple)), ())


def _merged(first: Known, other: Known) -> Known:
    """Merges the entries of one path in two variants of a union; the tag gets the names of both."""
    variants = tuple(dict.fromkeys((*first.variants, *other.variants)))
    choices = tuple(dict.fromkeys((*first.choices, *other.choices)))
    expected = f"one of {', '.join(choices)}" if choices else first.expected
    doc = first.doc or other.doc
    return replace(first, expected=expected, choices=choices, doc=doc, variants=variants)
