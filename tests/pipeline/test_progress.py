"""How far a step is."""

import pytest

from pipeline.progress import Progress


@pytest.mark.parametrize("total", [1, 2, 19, 20, 21, 137, 5000])
def test_plain_lines_are_about_twenty_with_the_first_and_the_last(total: int) -> None:
    progress = Progress("step1_sft", total)

    lines = [step for step in range(1, total + 1) if progress.is_line_due(step)]

    assert lines[0] == 1
    assert lines[-1] == total
    assert len(lines) <= 22
    assert len(lines) >= min(total, 11)


def test_the_status_has_what_a_person_watches() -> None:
    progress = Progress("step3_ppo", 10)
    metrics = {"score": -0.51234, "kl": 2.0, "clip_fraction": 0.1, "tokens_per_second": 12345.6}

    status = progress.status(4, metrics, seconds=40.0)

    assert status == "score -0.5123  kl 2  12,346 tokens/s  1:00 left"
