"""How much of a dialogue a step reads of what came before the last user turn."""

from dataclasses import replace

from pipeline.data.dialogues import Turns, join_turns
from pipeline.data.examples import Example


def with_history(prompt: Turns, history: str) -> Turns:
    """The prompt with as much of its history as `data.history` names.

    Args:
        prompt: a dialogue that ends in a user turn; empty of plain text.
        history: all; user, what users wrote alone, as one turn; last:N, the last N user turns and
            the turns between them. System messages stay.
    """
    if history == "all" or not prompt:
        return prompt
    system = tuple(turn for turn in prompt if turn.role == "system")
    users = [place for place, turn in enumerate(prompt) if turn.role == "user"]
    if history == "user":
        return (*system, *join_turns([prompt[place] for place in users]))
    kept = users[-int(history.removeprefix("last:")) :]
    first = kept[0] if kept else len(prompt)
    return (*system, *(turn for turn in prompt[first:] if turn.role != "system"))


def histories(examples: list[Example], history: str) -> list[Example]:
    """The examples with prompts that have lost the turns which `history` leaves out."""
    if history == "all":
        return examples
    return [replace(each, prompt=with_history(each.prompt, history)) for each in examples]
