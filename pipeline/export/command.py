"""The command `python -m pipeline.export`."""

from collections.abc import Sequence

from pipeline.cli import say
from pipeline.command import read_command
from pipeline.export.config import ExportConfig
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
    from pipeline.export.aside import check_out, written_aside
    from pipeline.export.card import write_export_card
    from pipeline.export.forms import prepare_form
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
