"""One module maps ranks: everything else uses an axis of the mesh, and names its group."""

import ast
from collections.abc import Iterator

import pytest

from tests.sources import PACKAGES, ROOT

ALLOWED = ("pipeline/parallel/", "pipeline/launch/", "pipeline/system/faults.py")
"""The mesh, the launcher, which sets the variables of the mesh, and faults, which need no mesh."""

MAPS = {
    *("get_rank", "get_world_size", "get_node_local_rank", "get_group_rank", "get_global_rank"),
    *("get_process_group_ranks", "new_group", "new_subgroups", "split_group", "WORLD"),
    *("init_device_mesh", "DeviceMesh"),
}
VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
OF_A_GROUP = {
    *("barrier", "monitored_barrier", "broadcast", "reduce", "scatter", "gather", "all_to_all"),
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "get_backend"),
}


def wrong(source: str) -> Iterator[str]:
    """Return places that compute ranks outside the mesh, or use the default group."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name) if name in MAPS:
                yield f"{node.lineno}: {name}"
            case ast.Constant(value=str(name)) if name in VARIABLES:
                yield f"{node.lineno}: {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name("dist"), attr=name)):
                named = [word.arg for word in node.keywords]
                if name in OF_A_GROUP and "group" not in named and name != "get_backend":
                    yield f"{node.lineno}: {name} without a group"
                if name == "get_backend" and not (node.args or named):
                    yield f"{node.lineno}: {name} without a group"
            case _:
                pass


def test_no_code_but_the_mesh_and_the_launcher_maps_ranks() -> None:
    files = [ROOT / "train.py", ROOT / "chat.py"]
    files += [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    names = {file: str(file.relative_to(ROOT)) for file in files}

    found = [
        f"{name}:{each}"
        for file, name in names.items()
        if not name.startswith(ALLOWED)
        for each in wrong(file.read_text(encoding="utf-8"))
    ]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "dist.get_rank()",
        "torch.distributed.get_world_size(group)",
        "from torch.distributed import new_group",
        "group = dist.group.WORLD",
        'int(os.environ.get("WORLD_SIZE", "1"))',
        'os.environ["RANK"]',
        "dist.barrier()",
        "dist.all_reduce(values, async_op=True)",
        "dist.get_backend()",
    ],
)
def test_the_rule_finds(line: str) -> None:
    assert list(wrong(line))


@pytest.mark.parametrize(
    "line",
    [
        "mesh.data.rank",
        "dist.all_reduce(values, group=group.process_group)",
        "dist.get_backend(group.process_group)",
        "mesh.world.barrier()",
    ],
)
def test_the_rule_lets_pass(line: str) -> None:
    assert not list(wrong(line))
