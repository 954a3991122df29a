"""The command `python -m pipeline.export`: converts a model and verifies the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.cli.options import parse_command, print_output
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

if TYPE_CHECKING:
    from pipeline.export.gguf_file import GgufExport
    from pipeline.export.onnx_file import OnnxExport
    from pipeline.export.weights import AdapterExport, MergedExport


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Source, format and target of an export."""

    path: str = ""
    """Directory of a model, of an adapter, or of a run, whose last actor is exported."""

    to: Literal["gguf", "onnx", "merged", "adapter"] | None = None
    """Format: gguf, onnx, merged (adapter and base) or adapter (without the base)."""

    out: Path | None = None
    """Output directory; it must be empty or not exist yet."""

    method: str | None = None
    """Method whose actor is exported, in a run with several; null uses the best."""

    base: str | None = None
    """Directory of the adapter's base model; null uses the one that the adapter names."""

    number_format: Literal["f32", "f16", "bf16", "q8_0"] = "f32"
    """Data type of a GGUF file's matrices: f32, f16, bf16 or q8_0."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path is missing; pass the directory of a model or a run")
        require(self.to is not None, "to is missing; pass gguf, onnx, merged or adapter")
        require(self.out is not None, "out is missing; pass the directory to write")
        require(
            self.number_format == "f32" or self.to == "gguf",
            f"number_format {self.number_format} is only for --to gguf; omit it",
        )
        require(
            self.base is None or self.to in ("merged", "adapter"),
            "base is only for --to merged and --to adapter; merge the adapter first",
        )


def main(argv: Sequence[str]) -> None:
    """Write an export under a temporary name, verify it, and rename it.

    Raises:
        UserError: there is no model, the format doesn't support it, the directory is not writable,
            or verification fails.
    """
    config = parse_command(
        ExportConfig,
        argv,
        usage=(
            f"{MODULE} pipeline.export --path DIR --to gguf --out DIR [--number-format q8_0]",
            f"{MODULE} pipeline.export --path DIR --to onnx|merged|adapter --out DIR",
        ),
        about="Export a model as GGUF or ONNX, with its adapter merged, or its adapter alone, and"
        " verify what was written: docs/export.md.",
    )
    from pipeline.export.source import atomic_directory, check_export_directory
    from pipeline.system.logs import configure_logging

    assert config.out is not None
    out = config.out.expanduser().resolve()
    check_export_directory(out)
    configure_logging(is_main=True)
    export = prepare(config)
    print_output(f"{export.source}: {export.title}")
    with atomic_directory(out) as partial:
        export.write(partial)
        verified = export.verify(partial)
    for sentence in verified:
        print_output(f"verified: {sentence}")
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print_output(f"{out}: {size / 2**20:.1f} MiB")


def prepare(config: ExportConfig) -> "GgufExport | OnnxExport | MergedExport | AdapterExport":
    """Prepare the export that the settings describe.

    Raises:
        UserError: there is no such model, the format doesn't support it, or a package is missing.
    """
    from pipeline.export.source import find_directory, read_source, require_packages

    packages = {"gguf": ["gguf"], "onnx": ["onnx", "onnxscript", "onnxruntime"]}
    require_packages(packages.get(str(config.to), []))
    directory = find_directory(config.path, config.method)
    if config.to == "gguf":
        from pipeline.export.gguf_file import GgufExport

        return GgufExport(read_source(directory), config.number_format)
    if config.to == "onnx":
        from pipeline.export.onnx_file import OnnxExport

        return OnnxExport(read_source(directory))
    from pipeline.export.weights import AdapterExport, MergedExport

    return (AdapterExport if config.to == "adapter" else MergedExport)(directory, config.base)
