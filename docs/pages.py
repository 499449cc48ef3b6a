"""Generate the pages in docs/generated: families, commands, routes, metrics, and Markdown from elsewhere in
the repository.

    python -m docs.pages

The pages in docs/ are written by hand. Their links are right on GitHub, and `relinked` makes them right on
the site. A new family gets its page without a change here.
"""

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
from prometheus_client.core import Metric
from typer.cli import get_docs_for_click

import zoo
from serving import protocol
from serving.cli.run import app
from serving.engine.wire import describe
from serving.engine_client import EngineClient
from serving.http import openapi
from serving.http.app import create_app
from serving.http.metrics import Metrics
from serving.settings import Settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Markdown elsewhere in the repository -> its page on the site.
COPIED = {
    "CHANGELOG.md": "generated/changelog.md",
    "CONTRIBUTING.md": "generated/contributing.md",
    "benchmarks/LOG.md": "generated/log.md",
    "examples/README.md": "generated/examples.md",
    "train_a_voice/README.md": "generated/train_a_voice.md",
    "tests/parity/README.md": "generated/parity.md",
    "zoo/small_voice/README.md": "generated/small_voice.md",
}
LICENCE = "no limits that the loader knows of; see the page of the checkpoint"


def write(folder: Path) -> None:
    """Write all generated pages into `folder`."""
    (folder / "families").mkdir(parents=True, exist_ok=True)
    for path, page in COPIED.items():
        put(DOCS / page, relinked((ROOT / path).read_text(), path, page))
    models = []
    for name in zoo.families():
        found = list(variants(name))
        models += [model for _, model in found]
        put(folder / "families" / f"{name}.md", family_page(name, found))
    put(folder / "commands.md", commands_page())
    put(folder / "metrics.md", metrics_page())
    schema = served_schema(models)
    put(folder / "openapi.json", json.dumps(schema, indent=1))
    put(folder / "api.md", api_page(schema))


def put(path: Path, text: str) -> None:
    """Write a file if its text has changed, so that Sphinx rebuilds only changed pages."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


# --- links ---


def relinked(text: str, path: str, page: str) -> str:
    """Return the Markdown of `path` with links that work on the site, where it stands at `page`.

    Links to Markdown with a page lead to that page. Other relative links become plain text."""

    def relink(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        name, _, anchor = target.partition("#")
        file = os.path.relpath(os.path.normpath(ROOT / Path(path).parent / name), ROOT)
        new = file.removeprefix("docs/") if file.startswith("docs/") else page_of(file)
        if new is None:
            return words
        if file == "README.md":  # the site's first page has other headings
            anchor = ""
        new = os.path.relpath(DOCS / new, (DOCS / page).parent)
        return f"{mark}[{words}]({new}{'#' + anchor if anchor else ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", relink, text)


def page_of(path: str) -> str | None:
    """Return the page on the site of a file outside docs/, or None if it has none."""
    if path == "README.md":
        return "index.md"
    family = path.removeprefix("zoo/").removesuffix("/README.md")
    if family in zoo.families():
        return f"generated/families/{family}.md"
    return COPIED.get(path)


# --- families ---


def variants(name: str) -> Iterator[tuple[str, protocol.ModelInfo]]:
    """Yield the sizes of a family's tiny demo checkpoints that differ in what they accept."""
    seen: list[dict[str, Any]] = []
    folder = zoo.families()[name]
    for size in importlib.import_module(f"zoo.{name}.demo").SIZES:
        if not size.startswith("tiny"):  # larger ones accept the same, and take gigabytes
            continue
        with tempfile.TemporaryDirectory() as directory:
            spec, _ = folder.survey(folder.write_demo(Path(directory) / "demo", size))
        info = describe(f"{name} {spec.variant}", spec)
        facts = {"modes": info.modes, "variant": info.variant}
        if facts not in seen:
            seen.append(facts)
            yield size, info


def family_page(name: str, found: list[tuple[str, protocol.ModelInfo]]) -> str:
    """Return a page with facts and options by variant, followed by the family's README."""
    path = f"zoo/{name}/README.md"
    own = relinked((ROOT / path).read_text(), path, f"generated/families/{name}.md")
    title, _, rest = own.partition("\n")
    assert title.startswith("# "), f"{path} begins with {title!r}"
    columns = [f"{info.variant}{' (instructions)' if 'instruct' in info.modes else ''}" for _, info in found]
    facts = {
        "demo checkpoint": [f"`--size {size}`" for size, _ in found],
        "sample rate": [f"{info.sample_rate_hz / 1000:g} kHz" for _, info in found],
        "modes": [", ".join(info.modes) for _, info in found],
        "voices": [", ".join(info.voices) or "no presets" for _, info in found],
        "languages": [
            ", ".join(info.languages) or "those of the checkpoint; cannot be chosen" for _, info in found
        ],
        "recordings": [recordings(info) for _, info in found],
        "licence of the weights": [info.licence or LICENCE for _, info in found],
    }
    lines = [
        title,
        "",
        "## At a glance",
        "",
        *table(["", *columns], ([name, *cells] for name, cells in facts.items())),
        "",
        "The table describes the demo checkpoints. `zoo inspect MODEL` describes your model, its memory included.",
        "",
        "## Options",
        "",
        *table(["option", "values", "default", "meaning", "variants"], option_rows(found)),
        "",
        "## The model",
    ]
    return "\n".join(lines) + "\n" + rest


def recordings(info: protocol.ModelInfo) -> str:
    if info.reference_s is None:
        return "none"
    number = "one" if info.max_references == 1 else f"up to {info.max_references}"
    return f"{number}, at most {info.reference_s[1]:g} s"


def option_rows(found: list[tuple[str, protocol.ModelInfo]]) -> Iterator[list[str]]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for _, info in found:
        for option in info.options:
            default = "the model's" if option.default is None else f"`{json.dumps(option.default)}`"
            row = (f"`{option.name}`", option.possible, default, option.help)
            rows.setdefault(row, []).append(info.variant)
    all_variants = {info.variant for _, info in found}
    for cells, names in rows.items():
        yield [*cells, "all" if set(names) == all_variants else ", ".join(dict.fromkeys(names))]


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


# --- commands and metrics ---


def commands_page() -> str:
    """Return the `--help` of every command, as Typer writes it."""
    command = typer.main.get_command(app)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="zoo", title="Commands")


def metrics_page() -> str:
    """Return the table of all metrics at /metrics."""
    lines = [
        "# Metrics",
        "",
        "All metrics at `/metrics`, generated from `serving/http/metrics.py`. The most important ones are explained in",
        "[operations](../operations.md#metrics).",
        "",
        *table(["metric", "type", "labels", "meaning"], map(metric_row, all_metrics())),
    ]
    return "\n".join(lines) + "\n"


def all_metrics() -> list[Metric]:
    """Return every metric of a server whose engine has reported its numbers, by name."""
    engine = EngineClient("/nowhere")
    counts = protocol.ModelStats(slots=0, running=0, waiting=0, underruns=0, graph_misses=0)
    engine.stats = protocol.Stats(
        pages=0, pages_free=0, pages_shared=0, pages_evicted=0, compiles_after_warmup=0, models={"m": counts}
    )
    engine.states = {"m": protocol.ModelState()}
    metrics = Metrics(engine)
    metrics.add_key("k")
    metrics.began("m", 0.1)
    metrics.ended("m", "stop", 1.0, 1.0)
    return sorted(metrics.registry.collect(), key=lambda metric: metric.name)


def metric_row(metric: Metric) -> list[str]:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels)
    return [f"`{name}`", metric.type, ", ".join(sorted(set(labels) - {"le"})), metric.documentation]


# --- routes ---


def served_schema(models: list[protocol.ModelInfo]) -> dict[str, Any]:
    """Return the schema that a server of one model of each variant answers at /schema."""
    litestar = create_app(EngineClient("/nowhere"), Settings(voices_dir="/nowhere"))
    plain = encode_json(litestar.openapi_schema.to_schema(), serializer=get_serializer())
    return openapi.with_options(plain, models)


def api_page(schema: dict[str, Any]) -> str:
    """Return routes, answers and bodies as Markdown."""
    lines = [
        "# Routes and bodies",
        "",
        "Generated from the schema that a server answers at `/schema` (also {download}`as a file <openapi.json>`). It lists the",
        "options of all families; a server lists those of its models. The [HTTP API](../http.md) page explains them.",
        "Every error has the body `ErrorBody`.",
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
            lines += ["", *table(["status", "meaning", "body"], answers)]
    lines += ["", "## Bodies"]
    for name, body in sorted(schema["components"]["schemas"].items()):
        if "properties" in body:
            lines += ["", f"### {name}", "", " ".join(body.get("description", "").split()), ""]
            required = body.get("required", [])
            rows = (
                [f"`{field}`", type_of(one), description(one, field in required)]
                for field, one in body["properties"].items()
            )
            lines += table(["field", "type", "meaning"], rows)
    return "\n".join(lines) + "\n"


def bodies(answer: dict[str, Any]) -> Iterator[str]:
    for kind, body in answer.get("content", {}).items():
        named = reference(body.get("schema", {}))
        yield f"`{kind}`" if named == "any" or "/json" not in kind else named


def reference(schema: dict[str, Any]) -> str:
    """Return a schema's name as a link, or its type."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    return type_of(schema)


def type_of(schema: dict[str, Any]) -> str:
    """Return the type of a field in words. Null is left out, because it means the default."""
    if "$ref" in schema:
        return reference(schema)
    if "anyOf" in schema:
        kinds = dict.fromkeys(type_of(one) for one in schema["anyOf"] if one != {"type": "null"})
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        if "prefixItems" in schema:  # a tuple
            return f"[{', '.join(map(type_of, schema['prefixItems']))}]"
        return f"list of {type_of(schema['items'])}"
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


def description(field: dict[str, Any], is_required: bool) -> str:
    text = " ".join(field.get("description", "").split())
    return f"**Required.** {text}" if is_required else text


if __name__ == "__main__":
    write(DOCS / "generated")
