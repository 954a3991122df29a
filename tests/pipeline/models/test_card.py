"""Model cards, read by the library of the Hub that they are made for."""

from pathlib import Path

from huggingface_hub import ModelCard

from pipeline.models.card import Card, write_card

FIGURES = {"rows": 256, "perplexity_after": 1.31512345, "judge": {"step1_sft": 0.25}}
SETTINGS = {"max_steps": 500, "model.optim.lr": 3e-3, "data.format": "/home/me/a.jinja"}


def read_card(directory: Path, base: str, *data: str) -> ModelCard:
    card = Card("Chat model", "Fine-tuned.", base, ("sft",))
    write_card(directory, card, data=data, figures=FIGURES, settings=SETTINGS)
    assert [file.name for file in directory.iterdir()] == ["README.md"]
    return ModelCard.load(directory / "README.md")


def test_the_hub_reads_what_the_card_says(tmp_path: Path) -> None:
    card = read_card(tmp_path, "facebook/opt-1.3b", "Dahoas/rm-static", "rows.jsonl:2")

    assert card.data.to_dict() == {
        "library_name": "transformers",
        "base_model": "facebook/opt-1.3b",
        "tags": ["rlhf", "sft"],
    }
    assert "- Data: Dahoas/rm-static, rows.jsonl:2\n" in card.text
    assert "| `rows` | 256 |\n| `perplexity_after` | 1.315 |\n" in card.text
    assert "| `judge: step1_sft` | 0.25 |\n" in card.text
    assert "```yaml\nmax_steps: 500\nmodel.optim.lr: 0.003\n```\n" in card.text
