"""The policies by their names on the wire: our own, and five engines' ways to stop."""

from stopway_core.policies.deepinfer import DEEPINFER
from stopway_core.policies.llamacpp import LLAMACPP
from stopway_core.policies.native import NATIVE
from stopway_core.policies.sglang import SGLANG
from stopway_core.policies.tensorrt_llm import TENSORRT_LLM
from stopway_core.policies.vllm import VLLM
from stopway_core.policy import Policy

__all__ = ["NATIVE", "POLICIES"]

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (NATIVE, VLLM, SGLANG, LLAMACPP, TENSORRT_LLM, DEEPINFER)
}
