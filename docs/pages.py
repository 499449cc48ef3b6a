"""The pages that are made of what is said elsewhere: READMEs, the log of measurements, `--help`, the OpenAPI schema, and
what each family's demo checkpoint says of itself. A family that is added has its page without a line here."""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from litestar.serialization import encode_json, get_serializer
from typer.cli import get_docs_for_click

import zoo
from serving import protocol
from serving.__main__ import app
from serving.engine.engine_process import describe
from serving.engine_client import EngineClient
from serving.http import openapi
from serving.http.app import create_app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Markdown elsewhere -> its page. What is not here, a link to it is its words alone.
MOVED = {
    "README.md": "index.md",
    "docs/quickstart.md": "quickstart.md",
    "docs/operations.md": "operations.md",
    "docs/add_a_family.md": "add_a_family.md",
    "CONTRIBUTING.md": "generated/contributing.md",
    "benchmarks/LOG.md": "generated/log.md",
    "examples/README.md": "generated/examples.md",
    "examples/train_a_voice/README.md": "generated/train_a_voice.md",
    "tests/parity/README.md": "generated/parity.md",
    "zoo/small_voice/README.md": "generated/small_voice.md",
}
WHOLE = {path: page for path, page in MOVED.items() if page.startswith("generated/")}
LICENCE = "no limits that the loader knows of; the checkpoint's own page says more"


def write(folder: Path) -> None:
    """All of them, into a folder of their own."""
    (folder / "families").mkdir(parents=True, exist_ok=True)
    for path, page in WHOLE.items():
        if (ROOT / path).is_file():
            put(DOCS / page, moved((ROOT / path).read_text(), path, page))
    for page, headings in {
        "http": ["HTTP"],
        "figures": ["How exact, how fast"],
        "python": ["Python"],
    }.items():
        text = "".join(section((ROOT / "README.md").read_text(), heading) for heading in headings)
        put(folder / f"{page}.md", moved(text, "README.md", f"generated/{page}.md"))
    models = []
    for name in zoo.families():
        found = list(variants(name))
        models += [model for _, model in found]
        put(folder / "families" / f"{name}.md", family_page(name, found))
    put(folder / "commands.md", commands())
    schema = served_schema(models)
    put(folder / "openapi.json", json.dumps(schema, indent=1))
    put(folder / "api.md", api(schema))


def put(path: Path, text: str) -> None:
    """Only what is new: Sphinx builds again what was touched."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


# --- what stands elsewhere ---


def section(text: str, heading: str) -> str:
    """One `##` of a page, as a page."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found is not None, f"README.md has no section {heading!r}"
    return f"# {heading}\n" + re.sub(r"^###", "##", found[1], flags=re.M)


def moved(text: str, path: str, page: str) -> str:
    """Markdown of `path` as it stands at `page`: links to what has a page, and pictures, go there."""

    def relink(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        place, _, anchor = target.partition("#")
        where = os.path.normpath(ROOT / Path(path).parent / place)
        name = os.path.relpath(where, ROOT)
        new = MOVED.get(name) or (family_target(name) if name.startswith("zoo/") else None)
        if mark:  # a picture
            new = os.path.relpath(where, DOCS)
        if new is None:
            return words
        return f"{mark}[{words}]({os.path.relpath(DOCS / new, (DOCS / page).parent)}{'#' + anchor if anchor else ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", relink, text)


def family_target(path: str) -> str | None:
    name = path.removeprefix("zoo/").removesuffix("/README.md")
    return f"generated/families/{name}.md" if name in zoo.families() else None


# --- families ---


def variants(name: str) -> Iterator[tuple[str, protocol.ModelInfo]]:
    """The demo checkpoints of a family that differ in what they take, by size."""
    seen: list[dict[str, Any]] = []
    folder = zoo.families()[name]
    for size in importlib.import_module(f"zoo.{name}.demo").SIZES:
        if not size.startswith("tiny"):  # the others take the same, and gigabytes
            continue
        with tempfile.TemporaryDirectory() as directory:
            spec, _ = folder.survey(folder.write_demo(Path(directory) / "demo", size))
        info = describe(f"{name} {spec.variant}", spec)
        facts = {"modes": info.modes, "variant": info.variant}
        if facts not in seen:
            seen.append(facts)
            yield size, info


def family_page(name: str, found: list[tuple[str, protocol.ModelInfo]]) -> str:
    """What can be asked for, by variant, and then the family's own README."""
    own = moved(
        (ROOT / "zoo" / name / "README.md").read_text(),
        f"zoo/{name}/README.md",
        f"generated/families/{name}.md",
    )
    title, _, rest = own.partition("\n")
    assert title.startswith("# "), f"zoo/{name}/README.md begins with {title!r}"
    columns = [f"{info.variant}{' (instructions)' if 'instruct' in info.modes else ''}" for _, info in found]
    facts = {
        "demo checkpoint": [f"`--size {size}`" for size, _ in found],
        "sample rate": [f"{info.sample_rate_hz / 1000:g} kHz" for _, info in found],
        "modes": [", ".join(info.modes) for _, info in found],
        "voices": [", ".join(info.voices) or "none of its own" for _, info in found],
        "languages": [
            ", ".join(info.languages) or "what the checkpoint was trained on; not chosen" for _, info in found
        ],
        "recordings": [recordings(info) for _, info in found],
        "licence of the weights": [info.licence or LICENCE for _, info in found],
    }
    lines = [
        title,
        "",
        "## At a glance",
        "",
        *table(["", *columns], ([what, *cells] for what, cells in facts.items())),
    ]
    lines += [
        "",
        "Of the demo checkpoints; `zoo inspect MODEL` says it of yours, with how long it speaks at a time and what memory it takes.",
        "",
        "## Options",
        "",
        *table(["option", "possible", "default", "", "of"], option_rows(found)),
        "",
        "## The model",
    ]
    return "\n".join(lines) + "\n" + rest


def recordings(info: protocol.ModelInfo) -> str:
    if info.reference_s is None:
        return "none"
    number = "one" if info.max_references == 1 else f"up to {info.max_references}"
    return f"{number}, of up to {info.reference_s[1]:g} s"


def option_rows(found: list[tuple[str, protocol.ModelInfo]]) -> Iterator[list[str]]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for _, info in found:
        for option in info.options:
            default = "the model's" if option.default is None else f"`{json.dumps(option.default)}`"
            rows.setdefault((f"`{option.name}`", option.possible, default, option.help), []).append(
                info.variant
            )
    everybody = {info.variant for _, info in found}
    for row, variants_with in rows.items():
        yield [*row, "all" if set(variants_with) == everybody else ", ".join(dict.fromkeys(variants_with))]


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


# --- commands and routes ---


def commands() -> str:
    """`--help` of every command, by Typer's own writer."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="zoo", title="Commands")
    return re.sub(r"^(#+ `zoo [^`]*`)$", r"\1", text, flags=re.M)


def served_schema(models: list[protocol.ModelInfo]) -> dict[str, Any]:
    """What /schema answers where a model of each variant is served."""
    litestar = create_app(EngineClient("/nowhere"), voices_dir="/nowhere")
    plain = encode_json(litestar.openapi_schema.to_schema(), serializer=get_serializer())
    return openapi.with_options(plain, models)


def api(schema: dict[str, Any]) -> str:
    """Routes, answers and bodies, from the schema."""
    lines = [
        "# HTTP API",
        "",
        "Made of the schema that a server answers at `/schema` (also as {download}`a file <openapi.json>`). Options of models are in",
        "it by family; a server says those of the models that it serves. Errors are `ErrorBody` everywhere.",
    ]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            lines += [
                "",
                f"## {method.upper()} `{path}`",
                "",
                " ".join(operation.get("description", "").split()),
            ]
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                lines += ["", f"Body, `{kind}`: {reference(body['schema'])}."]
            answers = (
                [f"`{status}`", answer["description"], ", ".join(bodies(answer))]
                for status, answer in sorted(operation["responses"].items())
            )
            lines += ["", *table(["status", "", "body"], answers)]
    lines += ["", "## Bodies"]
    for name, body in sorted(schema["components"]["schemas"].items()):
        if "properties" in body:
            lines += ["", f"### {name}", "", " ".join(body.get("description", "").split()), ""]
            needed = body.get("required", [])
            rows = (
                [f"`{field}`", kind_of(one), what(one, field in needed)]
                for field, one in body["properties"].items()
            )
            lines += table(["field", "type", ""], rows)
    return "\n".join(lines) + "\n"


def bodies(answer: dict[str, Any]) -> Iterator[str]:
    for kind, body in answer.get("content", {}).items():
        named = reference(body.get("schema", {}))
        yield f"`{kind}`" if named == "any" or "/json" not in kind else named


def reference(schema: dict[str, Any]) -> str:
    """A schema's name as a link, or its type."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    return kind_of(schema)


def kind_of(schema: dict[str, Any]) -> str:
    """The type of a field, in words; null, which means the default, is not said."""
    if "$ref" in schema:
        return reference(schema)
    if "anyOf" in schema:
        kinds = dict.fromkeys(kind_of(one) for one in schema["anyOf"] if one != {"type": "null"})
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        if "prefixItems" in schema:  # a tuple
            return f"[{', '.join(map(kind_of, schema['prefixItems']))}]"
        return f"list of {kind_of(schema['items'])}"
    bounds = [f"{sign} {schema[name]}" for name, sign in BOUNDS.items() if name in schema]
    return " ".join([schema.get("type", "any"), ", ".join(bounds)]).strip()


BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "maxLength": "length ≤",
    "maxItems": "items ≤",
}


def what(field: dict[str, Any], is_needed: bool) -> str:
    said = " ".join(field.get("description", "").split("\n"))
    return f"**needed.** {said}" if is_needed else said


if __name__ == "__main__":
    write(DOCS / "generated")
