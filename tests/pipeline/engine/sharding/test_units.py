"""Grouping of parameters into units."""

import pytest

from pipeline.engine.sharding.units import ROOT, find_units
from pipeline.models.forward.forward import Policy
from tests.families import FAMILIES, tiny_causal_lm


@pytest.mark.parametrize("family", list(FAMILIES))
def test_blocks_of_every_family_are_units_and_the_rest_is_root(family: str) -> None:
    model = Policy(tiny_causal_lm(family))

    *blocks, root = find_units(model)

    assert root.name == ROOT
    assert root.module is model
    assert len(blocks) == 2
    assert {type(block.module) for block in blocks} == {type(blocks[0].module)}
    owned = [param for unit in (*blocks, root) for param in unit.params.values()]
    assert {id(param) for param in owned} == {id(param) for param in model.parameters()}
    assert len(owned) == len({id(param) for param in owned})
    params = dict(model.named_parameters(remove_duplicate=False))
    for unit in (*blocks, root):
        assert all(params[name] is param for name, param in unit.params.items())
