"""What a newcomer gets wrong: arguments of another type, closed streams, a full disk. Each gives one clear error."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest
from tiny_llama import TINY

from vkdecode.decode import InferenceContext
from vkdecode.errors import InvalidInputError, ModelFileError, VkDecodeError
from vkdecode.generate import generate
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

RUN = f"{sys.executable} -W ignore -m vkdecode generate {TINY / 'llama'} --token-ids 1,2 -n 2"


@pytest.mark.parametrize("path", [None, 3, b"x", [], ""])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(ModelFileError, match=r"a model is a folder or a \.gguf file"):
        load(path)


@pytest.mark.parametrize("options", [{"device": 1.5}, {"device": []}, {"weights": []}, {"weights": 16}])
def test_a_device_or_element_type_of_another_type_is_refused(options: Any) -> None:
    with pytest.raises(InvalidInputError, match="not"):
        load(TINY / "llama", **options)


@pytest.mark.parametrize("lanes", ["subgruop", "", None])
def test_an_unknown_kernel_form_is_refused(lanes: Any) -> None:
    with pytest.raises(InvalidInputError, match="lanes must be one of"):
        Device(0, lanes=lanes)


def test_what_is_no_cache_or_context_is_refused(llama: Model) -> None:
    odd: Any
    for odd in (None, "x", 3):
        with InferenceContext(llama.device) as context, pytest.raises(InvalidInputError, match="KvCache"):
            llama.forward_with_kv_context_persistent([1], odd, context)
        with closing(llama.new_kv_cache(8)) as kv, pytest.raises(InvalidInputError, match="InferenceContext"):
            llama.forward_with_kv_context_persistent([1], kv, odd)


@pytest.mark.parametrize("prompt", [{1, 2}, {1: 2}, (one for one in range(3)), 5])
def test_a_prompt_without_an_order_is_refused(llama: Model, prompt: Any) -> None:
    with pytest.raises(VkDecodeError, match="neither text nor a sequence"):
        generate(llama, prompt, max_tokens=1)


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        (f"{RUN} >&-", 0, "prompt 2 tokens"),
        (f"{RUN} 2>&-", 0, ""),
        (f"{RUN} <&-", 0, "prompt 2 tokens"),
        (f"{RUN} >/dev/full", 1, "vkdecode: error: cannot write the output: No space left on device"),
    ],
)
def test_a_closed_stream_or_a_full_disk_is_no_fault_of_the_program(shell: str, code: int, said: str) -> None:
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "report" not in done.stderr
    assert said in done.stderr
