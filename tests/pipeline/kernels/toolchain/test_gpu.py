"""From a source to a launch: the compiler, what is kept of it, and the driver."""

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pipeline.errors import EXIT_OUT_OF_MEMORY, KernelError, UserError, exit_code
from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.toolchain import gpu as gpu_module
from pipeline.kernels.toolchain.cubins import DAY, CubinCache
from pipeline.kernels.toolchain.driver import OUT_OF_MEMORY, Driver, LaunchError
from pipeline.kernels.toolchain.gpu import Kernel
from pipeline.kernels.toolchain.nvrtc import CompileError, Nvrtc, find_nvrtc

SOURCE = """
#include "prelude.cuh"
struct Params { float* out; float value; i64 place; };
extern "C" __global__ void fill(Params p) {
  if (threadIdx.x == 0) write(p.out + p.place + blockIdx.x, p.value * SCALE);
}
"""


NO_BINARY_FOR_GPU, UNSUPPORTED_PTX = 209, 222


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (("out", ctypes.c_void_p), ("value", ctypes.c_float), ("place", ctypes.c_int64))


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of sources with one of the test's own."""
    directory = tmp_path / "sources"
    (directory / "fill").mkdir(parents=True)
    (directory / "fill" / "cuda.cu").write_text(SOURCE)
    monkeypatch.setattr(gpu_module, "OPERATORS", directory)
    return directory


@pytest.mark.jobs
def test_a_struct_arrives_as_it_was_given(emulator: Emulator, tmp_path: Path) -> None:
    gpu = emulator.gpu(cubins=CubinCache(tmp_path / "cubins"))
    out = torch.zeros(8)

    with emulator.memory(out):
        kernel = gpu.kernel("fill", "fill", {"SCALE": 2})
        kernel(Params(out.data_ptr(), 1.5, 3), grid=(4, 1, 1), block=(32, 1, 1), shared_bytes=64)

    assert out.tolist() == [0, 0, 0, 3, 3, 3, 3, 0]
    assert emulator.last_launch == "fill grid 4 1 1 block 32 1 1 shared 64 stream 0"


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((1, 65536, 1), (32, 1, 1), 0),
        ((1, 1, 65536), (32, 1, 1), 0),
        ((0, 1, 1), (32, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (32, 1, 1), 48 * 1024 + 1),
    ],
)
def test_a_launch_that_the_driver_refuses_is_an_error_with_its_numbers(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, emulator: Emulator
) -> None:
    kernel = emulator.gpu().kernel("fill", "fill", {"SCALE": 2})

    with pytest.raises(LaunchError) as caught:
        kernel(Params(), grid=grid, block=block, shared_bytes=shared)

    assert not isinstance(caught.value, UserError)
    numbers = f"grid {grid}, block {block}, {shared} bytes"
    assert f"kernel fill can't be started with {numbers}" in str(caught.value)
    assert "CUDA_ERROR_INVALID_VALUE (1)" in str(caught.value)
    assert "CUDA_LAUNCH_BLOCKING=1" in str(caught.value)


def test_a_launch_without_memory_ends_as_other_allocations_do(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(emulator.library)
    kernel = emulator.gpu(driver=driver).kernel("fill", "fill", {"SCALE": 2})
    monkeypatch.setattr(driver, "_launch", lambda *_: OUT_OF_MEMORY)

    with pytest.raises(torch.OutOfMemoryError, match=r"fill.*_OUT_OF_MEMORY") as caught:
        kernel(Params(), grid=(1, 1, 1), block=(32, 1, 1))

    assert exit_code(caught.value) == EXIT_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("code", "mend"),
    [(NO_BINARY_FOR_GPU, "a PyTorch whose CUDA knows this GPU"), (UNSUPPORTED_PTX, "newer driver")],
)
def test_code_that_does_not_load_is_an_error_before_the_first_launch(
    code: int, mend: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(emulator.library)
    monkeypatch.setattr(driver, "_get_function", lambda *_: code)

    with pytest.raises(KernelError) as caught:
        emulator.gpu(driver=driver).kernel("fill", "fill", {"SCALE": 2})

    kernel = r"fill\[SCALE=2\] can't be loaded onto cpu \(compute capability 9\.0\)"
    caught.match(rf"{kernel} as NVRTC 13\.0 \(.*libemulator\.so\) made it for sm_90: .*{mend}")


def test_code_that_the_driver_refuses_names_kernel_gpu_and_compiler(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Nvrtc, "compile", lambda *_, **__: (b"no code", ""))

    with pytest.raises(KernelError, match=r"fill\[SCALE=2\].*sm_90: .*cuLibraryLoadData.*\(200\)"):
        emulator.gpu(cubins=CubinCache(tmp_path)).kernel("fill", "fill", {"SCALE": 2})


@pytest.mark.parametrize(
    ("version", "package"),
    [("12.8", "nvidia-cuda-nvrtc-cu12"), ("13.0", "nvidia-cuda-nvrtc")],
)
def test_the_package_that_brings_the_compiler_is_named(
    version: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: Nvrtc, path: str | Path) -> None:
        raise KernelError(f"{path} can't be loaded")

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(Nvrtc, "__init__", missing)

    with pytest.raises(KernelError, match=f"install the package {package} of CUDA {version}"):
        find_nvrtc()


def test_the_compilers_own_words_reach_the_user(emulator: Emulator, sources: Path) -> None:
    (sources / "fill" / "cuda.cu").write_text(SOURCE.replace("p.value", "p.worth"))

    with pytest.raises(KernelError, match=r"(?s)fill\[SCALE=2\].*sm_90.*NVRTC 13.0.*worth"):
        emulator.gpu().kernel("fill", "fill", {"SCALE": 2})


def test_what_was_compiled_is_kept_and_not_compiled_again(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins = CubinCache(tmp_path / "cubins")
    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})
    (kept,) = cubins.directory.iterdir()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(Nvrtc, "compile", fail)
    again = emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})

    assert isinstance(again, Kernel)
    assert list(cubins.directory.iterdir()) == [kept]


def test_another_macro_source_header_or_gpu_is_another_cubin(
    emulator: Emulator, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubins = CubinCache(tmp_path / "cubins")

    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})
    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 3})
    emulator.gpu(cubins=cubins, capability=80).kernel("fill", "fill", {"SCALE": 2})
    (sources / "fill" / "cuda.cu").write_text(SOURCE + "\n")
    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})
    other = {name: text + "\n" for name, text in gpu_module.HEADERS.items()}
    monkeypatch.setattr(gpu_module, "HEADERS", other)
    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})

    assert len(list(cubins.directory.iterdir())) == 5


def flipped(whole: bytes, place: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


@pytest.mark.parametrize(
    "damaged",
    [
        lambda _: b"",
        lambda _: b"no cubin",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: flipped(whole, len(whole) // 2),
        lambda whole: flipped(whole, -2),
    ],
    ids=["empty", "other", "half", "a bit of the code", "a bit of the digest"],
)
def test_a_damaged_cubin_is_made_anew(
    damaged: Callable[[bytes], bytes], emulator: Emulator, tmp_path: Path
) -> None:
    cubins = CubinCache(tmp_path / "cubins")
    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})
    (kept,) = cubins.directory.iterdir()
    kept.write_bytes(damaged(kept.read_bytes()))
    assert cubins.read(kept) is None

    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})

    assert cubins.read(kept) is not None


def test_a_whole_cubin_that_the_driver_refuses_is_made_anew(
    emulator: Emulator, tmp_path: Path
) -> None:
    cubins = CubinCache(tmp_path / "cubins")
    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})
    (kept,) = cubins.directory.iterdir()
    cubins.write(kept, b"no cubin")

    emulator.gpu(cubins=cubins).kernel("fill", "fill", {"SCALE": 2})

    assert cubins.read(kept) != b"no cubin"


def test_a_cache_that_cannot_be_written_is_done_without(emulator: Emulator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    kernel = emulator.gpu(cubins=CubinCache(tmp_path / "file" / "cubins")).kernel(
        "fill", "fill", {"SCALE": 2}
    )

    assert isinstance(kernel, Kernel)


def test_processes_that_build_the_same_cubin_leave_one(tmp_path: Path) -> None:
    cubins = CubinCache(tmp_path / "cubins")
    path = cubins.path("fill", ["source"])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: cubins.write(path, b"image" * 1000), range(64)))

    assert [each.name for each in cubins.directory.iterdir()] == [path.name]
    assert cubins.read(path) == b"image" * 1000


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    cubins = CubinCache(tmp_path)
    old, new, theirs = (
        tmp_path / name for name in ("rlhf-kernel-a.tmp", "rlhf-kernel-b.tmp", "thesis.tmp")
    )
    for each in (old, new, theirs):
        each.write_text("half")
    for each in (old, theirs):
        os.utime(each, (time.time() - DAY - 60,) * 2)

    cubins.write(cubins.path("fill", []), b"image")

    assert not old.exists()
    assert new.exists()
    assert theirs.exists()


def test_a_gpu_later_than_the_compiler_gets_ptx_of_the_latest_it_knows(emulator: Emulator) -> None:
    assert emulator.gpu(capability=90).architecture == "sm_90"
    assert emulator.gpu(capability=120).architecture == "compute_90"
    assert emulator.gpu(capability=86).architecture == "compute_80"


def test_a_gpu_older_than_the_compiler_is_refused(emulator: Emulator) -> None:
    with pytest.raises(KernelError, match=r"7\.5 and later, and this GPU has 7\.0; install"):
        _ = emulator.gpu(capability=70).architecture
    with pytest.raises(KernelError, match=r"7\.5 and later, and this GPU has 6\.1$"):
        _ = emulator.gpu(capability=61).architecture


def test_what_is_no_driver_or_no_compiler_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libnothing.so"
    library.write_text("")

    with pytest.raises(KernelError, match=r"libnothing\.so is not a CUDA driver"):
        Driver(library)
    with pytest.raises(KernelError, match=r"libnothing\.so can't be loaded as NVRTC"):
        Nvrtc(library)


def test_an_entry_that_is_not_there_and_an_option_that_is_none(emulator: Emulator) -> None:
    with pytest.raises(KernelError, match="cuLibraryGetKernel of empty: CUDA_ERROR_NOT_FOUND"):
        emulator.gpu().kernel("fill", "empty", {"SCALE": 2})
    with pytest.raises(CompileError, match="INVALID_OPTION"):
        Nvrtc(emulator.library).compile("", name="a.cu", headers={}, options=["nonsense"])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_a_pytorch_without_cuda_is_named() -> None:
    with pytest.raises(KernelError, match="build without CUDA"):
        find_nvrtc()
