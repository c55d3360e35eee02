"""Where the time of a run goes, stage by stage: `npqwen generate --profile`.

A model's functions are arguments, so a model can be had whose functions are timed; the model itself is not touched.
Several stages are products: which one it is, a product's matrix tells.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from npqwen.model import Model

STAGES = ("embedding", "norms", "qkv", "rope", "attention", "o", "mlp", "logits", "rest")  # rest: cache, sampling, sums


class Profile:
    """Seconds of each stage. Prefill ends with the first logits; `model` is the same model, timed."""

    def __init__(self, model: Model):
        w, ops = model.weights, model.ops
        product = {id(w.unembed): "logits"}
        for layer in w.layers:
            product |= {id(layer.q): "qkv", id(layer.o): "o", id(layer.gate): "mlp", id(layer.down): "mlp"}
        self.prefill: defaultdict[str, float] = defaultdict(float)
        self.decode: defaultdict[str, float] = defaultdict(float)
        self._now = self.prefill
        self._since = time.perf_counter()

        def timed(function: Callable[..., Any], stage: str | None = None) -> Callable[..., Any]:
            @wraps(function)
            def run(x, *others, **kwargs):
                start = time.perf_counter()
                result = function(x, *others, **kwargs)
                name = stage or product[id(others[0])]
                self._now[name] += time.perf_counter() - start
                if name == "logits" and self._now is self.prefill:
                    self._end(self.decode)
                return result

            return run

        timed_ops = replace(
            ops,
            embed=timed(ops.embed, "embedding"),
            linear=timed(ops.linear),
            linears=timed(ops.linears),
            rms_norm=timed(ops.rms_norm, "norms"),
            rope=timed(ops.rope, "rope"),
            swiglu=timed(ops.swiglu, "mlp"),
            attend=timed(ops.attend, "attention"),
        )
        self.model = replace(model, ops=timed_ops)

    def start(self) -> None:
        """Forget what was timed before: a first run compiles kernels and reads weights from the disk."""
        self.prefill.clear()
        self.decode.clear()
        self._now, self._since = self.prefill, time.perf_counter()

    def end(self) -> None:
        """What was not in any stage until now is the rest. Once, before the seconds are read."""
        self._end(self._now)

    def _end(self, then: defaultdict[str, float]) -> None:
        now = time.perf_counter()
        self._now["rest"] = now - self._since - sum(self._now.values())
        self._now, self._since = then, now

    def table(self, prompt_tokens: int, new_tokens: int) -> str:
        """Shares in percent, and what they are shares of. After end()."""
        steps = new_tokens - 1  # the first token comes with the prefill
        lines = [f"{'stage':10} {'prefill':>8} {'decode':>8}"]
        for stage in STAGES:
            shares = (100 * phase[stage] / (sum(phase.values()) or 1) for phase in (self.prefill, self.decode))
            lines.append(f"{stage:10} " + " ".join(f"{share:6.1f} %" for share in shares))
        per_token = 1e3 * sum(self.decode.values()) / steps if steps > 0 else 0.0
        lines.append(
            f"prefill: {sum(self.prefill.values()):.3f} s for {prompt_tokens} tokens; decode: {per_token:.2f} ms a token"
        )
        return "\n".join(lines)
