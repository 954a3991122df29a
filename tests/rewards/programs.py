# ruff: noqa: ANN001, ANN003, ANN201, ANN202, ARG001, S307
"""Reward functions of the tests, in the forms of several projects."""

import asyncio
import os
import subprocess
import sys
import time


def length(episodes):
    return [float(len(episode.response)) for episode in episodes]


async def slow_length(episodes):
    async def score(episode):
        await asyncio.sleep(0.05)
        return len(episode.response)

    return await asyncio.gather(*map(score, episodes))


def trl_plain(prompts, completions, answer, **kwargs):
    assert all(isinstance(text, str) for text in (*prompts, *completions))
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def trl_messages(prompts, completions, answer):
    assert prompts[0][-1]["role"] == "user"
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def openrlhf(queries, prompts, labels):
    correct = [q == p + a for q, p, a in zip(queries, prompts, labels, strict=True)]
    return {"rewards": [float(value) for value in correct], "scores": correct, "extra_logs": {}}


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True}


def evaluate(solution_str, ground_truth):
    """Return the number in the response."""
    return eval(solution_str)


def misbehave(solution_str, ground_truth):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "spin":
        while True:
            pass
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "fork":
        os.fork()  # both processes return
    if solution_str == "orphan":
        command = [sys.executable, "-c", "import time; time.sleep(1000)", str(ground_truth)]
        subprocess.Popen(command, start_new_session=True)
        time.sleep(1000)
    return 1.0
