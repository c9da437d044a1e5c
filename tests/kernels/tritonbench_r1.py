"""Two kernels that DeepSeek-R1 wrote for TritonBench-G, without declarations."""

import json

from brought import FOLDER, file, module

REPOSITORY = "thunlp/TritonBench"
ANSWERS = "LLM_generated/Bench_G_general_purpose/output_DeepSeek-R1_comp.jsonl"


def _answer(line: int):
    """Run the code of a line; Triton reads the source of its kernels from a file."""
    text = file(REPOSITORY, ANSWERS).read_text(encoding="utf-8").splitlines()[line]
    path = FOLDER / REPOSITORY / f"deepseek_r1_{line}.py"
    code = json.loads(text)["predict"]
    if not path.is_file() or path.read_text(encoding="utf-8") != code:
        path.write_text(code, encoding="utf-8")
    return module(REPOSITORY, path.name)


_flash_attn_triton, _triton_fa = _answer(25).flash_attn_triton, _answer(132).triton_fa


def flash_attn_triton(q, k, v, causal, sm_scale):
    """Answer to the task flash_attn_triton."""
    return _flash_attn_triton(q, k, v, causal, sm_scale)


def triton_fa(q, k, v, causal, sm_scale):
    """Answer to the task triton_fa."""
    return _triton_fa(q, k, v, sm_scale, causal)
