"""The command `python -m pipeline.export`, and the forms in which a model is exported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli import say
from pipeline.command import read_command
from pipeline.export.config import ExportConfig
from pipeline.export.source import (
    check_out,
    find_directory,
    read_source,
    require_packages,
    write_export_card,
    written_aside,
)
from pipeline.installation import MODULE


def main(argv: Sequence[str]) -> None:
    """Write an export aside, verify it, and give it its name.

    Raises:
        UserError: no model, a form that it hasn't, a place that can't be written, or something
            that was not verified.
    """
    config = read_command(
        ExportConfig,
        argv,
        usage=(
            f"{MODULE} pipeline.export --path DIR --to gguf --out DIR [--number-format q8_0]",
            f"{MODULE} pipeline.export --path DIR --to onnx|merged|adapter --out DIR",
        ),
        about="Export a model as GGUF or ONNX, with its adapter merged, or its adapter alone, and"
        " verify what was written: docs/export.md.",
    )
    from pipeline.logs import configure_logging

    assert config.out is not None
    out = config.out.expanduser()
    check_out(out)
    configure_logging(is_main=True)
    form = prepare_form(config)
    say(f"{form.source}: {form.title}")
    if config.dry_run:
        say(f"would write {out}, and verify: {form.will_verify}")
        return
    with written_aside(out) as partial:
        form.write(partial)
        verified = form.verify(partial)
        write_export_card(
            form.source, partial, form=form.title, verified=verified, use=form.use(out.name)
        )
    for each in verified:
        say(f"verified: {each}")
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    say(f"{out}: {size / 2**20:.1f} MiB")


@dataclass(frozen=True)
class Form:
    """An export that can be made: whatever can be refused early was not."""

    source: Path
    title: str
    will_verify: str

    write: Callable[[Path], None]
    """Into a directory that is there."""

    verify: Callable[[Path], list[str]]
    """What was verified, in sentences; raises UnverifiedError."""

    use: Callable[[str], str]
    """Lines that show how it is used, by the name of its directory."""


def prepare_form(config: ExportConfig) -> Form:
    """The export that the settings describe.

    Raises:
        UserError: there is no such model, it has no such form, or a package is missing.
    """
    if config.to == "gguf":
        return _gguf(config)
    if config.to == "onnx":
        return _onnx(config)
    return _weights(config)


def _gguf(config: ExportConfig) -> Form:
    require_packages(["gguf"])
    source = read_source(find_directory(config.path, config.method))

    from pipeline.export.gguf_file import plan_gguf, write_gguf
    from pipeline.export.gguf_verify import has_llama_cpp, verify_gguf

    plan = plan_gguf(source, config.number_format)
    name = f"model-{config.number_format}.gguf"
    by = "the file's vocabulary" + (" and llama.cpp" if has_llama_cpp() else "")
    return Form(
        source=source.directory,
        title=f"GGUF of a {source.kind}, {config.number_format}",
        will_verify=f"{len(plan.names)} tensors read back, tokens of {config.texts} texts by {by}",
        write=lambda directory: write_gguf(plan, directory / name),
        verify=lambda directory: verify_gguf(plan, directory / name, texts=config.texts),
        use=lambda out: f"llama-cli -m {out}/{name}",
    )


def _onnx(config: ExportConfig) -> Form:
    require_packages(["onnx", "onnxscript", "onnxruntime"])
    source = read_source(find_directory(config.path, config.method))

    from pipeline.export.onnx_file import GRAPH, load_graph, write_onnx
    from pipeline.export.onnx_verify import verify_onnx

    graph = load_graph(source, cache=config.cache == "kv")
    inputs, outputs = _shown(graph.inputs), _shown(graph.outputs)
    return Form(
        source=source.directory,
        title=f"ONNX of a {source.kind}; {inputs} -> {outputs}",
        will_verify=f"{outputs} by onnxruntime on batches with and without padding",
        write=lambda directory: write_onnx(graph, source, directory),
        verify=lambda directory: verify_onnx(graph, directory / GRAPH),
        use=lambda out: f'onnxruntime.InferenceSession("{out}/{GRAPH}")',
    )


def _shown(names: Sequence[str]) -> str:
    """Names of inputs or outputs; of keys and values those of the first layer."""
    shown = [name for name in names if "." not in name or ".0." in name]
    return ", ".join(shown) + (", ..." if len(shown) < len(names) else "")


def _weights(config: ExportConfig) -> Form:
    from pipeline.export.weights import (
        plan_adapter,
        plan_merged,
        verify_adapter,
        verify_merged,
        write_adapter,
        write_merged,
    )

    directory = find_directory(config.path, config.method)
    if config.to == "adapter":
        adapter = plan_adapter(directory)
        return Form(
            source=adapter,
            title="adapter without its base, in peft's form",
            will_verify="its tensors read back",
            write=lambda partial: write_adapter(adapter, partial),
            verify=lambda partial: verify_adapter(adapter, partial, base=config.base),
            use=lambda out: f'PeftModel.from_pretrained(base, "{out}")',
        )
    plan = plan_merged(directory, config.base)
    kind = "SequenceClassification" if plan.base.is_classifier else "CausalLM"
    auto = f"AutoModelFor{kind}"
    return Form(
        source=directory,
        title="weights with the adapter merged",
        will_verify="each tensor, against W + alpha / r * B A where there is an adapter",
        write=lambda partial: write_merged(plan, partial),
        verify=lambda partial: verify_merged(plan, partial),
        use=lambda out: f'{auto}.from_pretrained("{out}")',
    )
