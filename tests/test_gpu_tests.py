"""The tool that runs tests/gpu: which files share a GPU, what it tells, and that a file that dies is no success."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import gpu_tests

FILES = sorted(gpu_tests.FOLDER.rglob("test_*.py"))


def names(jobs: list[gpu_tests.Job]) -> set[str]:
    return {file.stem.removeprefix("test_").removesuffix("_gpu") for job in jobs for file in job.files}


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_file_runs_once_in_the_company_it_may_have(gpus: int) -> None:
    found = gpu_tests.jobs(FILES, gpus, 6)
    kernels, engines = found.sharing[:gpus], found.sharing[gpus:]
    assert all(job.workers == 6 and len(job.files) > 1 for job in kernels)
    assert {"attention", "kernels", "moe", "sampling", "fused", "gemm_cublaslt"} <= names(kernels)
    assert {"engine", "invariance", "long_prompts", "service", "train"} <= names(engines)
    assert {"faults", "gaps", "measured_step", "models", "probe", "served_gaps"} <= names(found.alone)
    assert {"decode_context_parallel", "parallel", "sent_rows", "steps", "under_way"} <= names(found.together)
    rest = [*engines, *found.alone, *found.together]
    assert all(len(job.files) == job.workers == 1 for job in rest)
    assert sorted(file for job in [*kernels, *rest] for file in job.files) == FILES


SOURCES = {
    "test_a_gpu.py": "import strata.kernels\ndef test_it():\n    pass\n",
    "test_b_gpu.py": "import strata.kernels\nimport pytest\ndef test_it():\n    pytest.skip('needs 4 GPUs')\n",
    "test_c_gpu.py": "import os\ndef test_it():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] in ('7', '9')\n",
    "test_d_gpu.py": "import os\nRANKS = 1\ndef test_it():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == '7,9'\n",
}


def run_all(folder: Path, sources: dict[str, str]) -> int:
    for name, source in sources.items():
        (folder / name).write_text(source.replace("RANKS = 1", "from tests.gpu.ranks import found_by_ranks"))
    return gpu_tests.run_all(sorted(folder.glob("test_*.py")), ["7", "9"], 1)


def test_what_ran_and_what_was_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all(tmp_path, SOURCES) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("passed" in line for line in lines) == 5
    assert "        skipped 1: needs 4 GPUs" in lines
    assert "[ 4/4] test_d_gpu" in lines[-2]
    assert lines[-2].endswith("GPUs 7, 9")
    assert lines[-1].startswith("3 tests passed, 1 skipped")


def test_failures_and_files_that_die_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = {
        "test_a_gpu.py": "def test_it():\n    assert 1 == 2\n",
        "test_b_gpu.py": "import os\ndef test_it():\n    os.abort()\n",
        "test_c_gpu.py": "import nothing_of_this_name\n",
        "test_d_gpu.py": "def test_it():\n    pass\n",
    }
    assert run_all(tmp_path, sources) == 1
    out = capsys.readouterr().out
    assert "assert 1 == 2" in out
    last = out.splitlines()[-1]
    assert last.startswith("1 tests passed")
    assert all(name in last for name in ("test_a_gpu", "test_b_gpu", "test_c_gpu"))
