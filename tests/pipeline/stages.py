"""The three steps as train.py names them, each run by the toy step where a test runs them."""

from dataclasses import replace

from train import STAGES

TOY_STAGES = tuple(replace(stage, module="tests.pipeline.toy_step") for stage in STAGES)
