"""Trains the embedded model and writes npqwen/tiny: python -m tools.train_tiny --out RUN_DIR --export npqwen/tiny

About an hour on two idle cores. A killed run goes on by the same command; `--export-only` writes what is there so far:
the files of the newest checkpoint. What mattered: untied output; one random direction shared by all embeddings (Qwen3
has no biases on q and k: without it no head learns to look at the previous token); repeated random segments first;
texts that grow; in the middle some facts whose number stands close behind the name, without which binding came late.
"""

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.tiny_data import SINK, Row, Source, Stage, prose, train_tokenizer

STAGES = (
    Stage(end=900, n_rows=24, n=160, n_facts=3, n_text=80, easy=0.0, first_digit=4.0),
    Stage(end=1400, n_rows=16, n=256, n_facts=5, n_text=140, easy=0.0, first_digit=4.0),
    Stage(end=1600, n_rows=16, n=256, n_facts=5, n_text=140, easy=0.5, first_digit=8.0),
    Stage(end=2000, n_rows=10, n=512, n_facts=10, n_text=320, easy=0.3, first_digit=8.0),
    Stage(end=2400, n_rows=6, n=1024, n_facts=20, n_text=680, easy=0.2, first_digit=8.0),
    Stage(end=3000, n_rows=3, n=2304, n_facts=20, n_text=1900, easy=0.1, first_digit=8.0, copies=0.8, n_copy=192),
    Stage(
        end=3350,
        n_rows=3,
        n=2304,
        n_facts=20,
        n_text=1900,
        easy=0.1,
        first_digit=8.0,
        copies=1.0,
        n_copy=192,
        copy=4.0,
        soup=0.3,
    ),
)
SEGMENT_STEPS, WARM_UP, LAST_STEP = 500, 100, STAGES[-1].end
LEARNING_RATE = 0.01
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


class Layer(nn.Module):
    def __init__(self, E: int, H: int, K: int, D: int, F_: int) -> None:
        super().__init__()
        self.H, self.K, self.D = H, K, D
        sizes = {"q_proj": (E, H * D), "k_proj": (E, K * D), "v_proj": (E, K * D), "o_proj": (H * D, E)}
        self.self_attn = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.self_attn["q_norm"], self.self_attn["k_norm"] = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        sizes = {"gate_proj": (E, F_), "up_proj": (E, F_), "down_proj": (F_, E)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(E, eps=1e-6), nn.RMSNorm(E, eps=1e-6)

    def forward(self, x_BTE: Tensor, cos_TD: Tensor, sin_TD: Tensor, mask_TT: Tensor | None) -> Tensor:
        B, T, _ = x_BTE.shape
        attn, mlp = self.self_attn, self.mlp
        h_BTE = self.input_layernorm(x_BTE)
        q_BHTD = attn["q_norm"](attn["q_proj"](h_BTE).view(B, T, self.H, self.D)).transpose(1, 2)
        k_BKTD = attn["k_norm"](attn["k_proj"](h_BTE).view(B, T, self.K, self.D)).transpose(1, 2)
        v_BKTD = attn["v_proj"](h_BTE).view(B, T, self.K, self.D).transpose(1, 2)
        G = self.H // self.K
        out_BHTD = F.scaled_dot_product_attention(
            rotate(q_BHTD, cos_TD, sin_TD),
            rotate(k_BKTD, cos_TD, sin_TD).repeat_interleave(G, 1),
            v_BKTD.repeat_interleave(G, 1),
            attn_mask=mask_TT,
            is_causal=mask_TT is None,
        )
        x_BTE = x_BTE + attn["o_proj"](out_BHTD.transpose(1, 2).reshape(B, T, -1))
        h_BTE = self.post_attention_layernorm(x_BTE)
        return x_BTE + mlp["down_proj"](F.silu(mlp["gate_proj"](h_BTE)) * mlp["up_proj"](h_BTE))


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos_TD - b * sin_TD, b * cos_TD + a * sin_TD), dim=-1)


class Qwen3(nn.Module):
    """Qwen3ForCausalLM with the parameter names of its checkpoints, without the parts that training does not need."""

    def __init__(self) -> None:
        super().__init__()
        E, V = CONFIG["hidden_size"], CONFIG["vocab_size"]
        H, K = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        sizes = E, H, K, CONFIG["head_dim"], CONFIG["intermediate_size"]
        layers = nn.ModuleList(Layer(*sizes) for _ in range(CONFIG["num_hidden_layers"]))
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(V, E), "layers": layers, "norm": nn.RMSNorm(E, eps=1e-6)}
        )
        self.lm_head = nn.Linear(E, V, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.5 if "embed" in name else 0.02 if "lm_head" in name else 0.05)
        with torch.no_grad():
            self.model["embed_tokens"].weight.add_(0.5 * torch.randn(E))

    def forward(self, ids_BT: Tensor, positions_T: Tensor | None = None, mask_TT: Tensor | None = None) -> Tensor:
        """Last hidden states, normed; the caller multiplies only the rows it needs by lm_head."""
        if positions_T is None:
            positions_T = torch.arange(ids_BT.shape[1])
        half = CONFIG["head_dim"] // 2
        angle_TD = positions_T[:, None].double() * CONFIG["rope_theta"] ** (-torch.arange(half).double() / half)
        cos_TD, sin_TD = angle_TD.cos().float(), angle_TD.sin().float()
        x_BTE = self.model["embed_tokens"](ids_BT)
        for layer in self.model["layers"]:
            x_BTE = layer(x_BTE, cos_TD, sin_TD, mask_TT)
        return self.model["norm"](x_BTE)


def rows_of(source: Source, step: int) -> list[Row]:
    if step < SEGMENT_STEPS:
        return [source.segments(step, row, 64) for row in range(24)]
    stage = next(stage for stage in STAGES if step < stage.end)
    rng = source.rng("step", step)
    if rng.random() < 0.05:
        return [source.segments(step, row, 192) for row in range(16)]
    return [source.text(step, row, stage, int(stage.n_text * rng.uniform(0.9, 1.08))) for row in range(stage.n_rows)]


def losses(model: Qwen3, rows: list[Row]) -> tuple[Tensor, float]:
    """(weighted mean, mean over the heaviest rows alone): nats per token."""
    ids_BT = torch.tensor([row.ids for row in rows])
    weight_BT = torch.tensor([row.weights for row in rows])[:, 1:]
    needed = weight_BT > 0
    logits_TV = model.lm_head(model(ids_BT[:, :-1])[needed])
    nll_T = F.cross_entropy(logits_TV, ids_BT[:, 1:][needed], reduction="none")
    weight_T = weight_BT[needed]
    heavy = weight_T == weight_T.max()
    return (nll_T * weight_T).sum() / weight_T.sum(), nll_T.detach()[heavy].mean().item()


@torch.inference_mode()
def held_out_scores(model: Qwen3, source: Source, index: int, n_facts: int, n_text: int) -> tuple[int, int, float]:
    """(right with the whole text, right with the first four tokens only, copy NLL), each tail alone behind the text.

    Right means that every digit is the most likely token, which is what greedy decoding gives.
    """
    text, asked, span = source.held_out(index, n_facts, n_text)
    tails = [question + answer for question, answer in asked] + [span]
    ids = text + [i for tail in tails for i in tail]
    positions = list(range(len(text))) + [len(text) + i for tail in tails for i in range(len(tail))]
    owner_T = torch.tensor([-1] * len(text) + [j for j, tail in enumerate(tails) for _ in tail])
    causal_TT = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    own_TT = causal_TT & ((owner_T[:, None] == owner_T) | (owner_T == -1))
    sinks_TT = own_TT & ~((owner_T[:, None] >= 0) & (owner_T == -1) & (torch.arange(len(ids)) >= 4))
    right = []
    for mask_TT in (own_TT, sinks_TT):
        logits_TV = model.lm_head(model(torch.tensor([ids]), torch.tensor(positions), mask_TT)[0])
        hit_T = logits_TV[:-1].argmax(-1) == torch.tensor(ids)[1:]
        end, n_right = len(text), 0
        for question, answer in asked:
            end += len(question) + len(answer)
            n_right += bool(hit_T[end - len(answer) - 1 : end - 1].all())
        right.append(n_right)
        if mask_TT is own_TT:
            copy = F.cross_entropy(logits_TV[end:-1], torch.tensor(ids)[end + 1 :]).item()
    return right[0], right[1], copy


def export(model: Qwen3, source: Source, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SINK,
        "pad_token": SINK,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    generation = {"eos_token_id": CONFIG["eos_token_id"], "pad_token_id": CONFIG["pad_token_id"], "do_sample": False}
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    source.tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="train the embedded model")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and train.log")
    parser.add_argument("--export", type=Path, help="folder for the files of the checkpoint, with the log")
    parser.add_argument("--export-only", action="store_true", help="train nothing, export what --out holds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--last-step", type=int, default=LAST_STEP, help="learning rate reaches zero here")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)

    paragraphs = prose()
    source = Source(train_tokenizer(paragraphs, CONFIG["vocab_size"]), paragraphs, args.seed)
    model = Qwen3()
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    outer = [p for name, p in model.named_parameters() if p.ndim == 1 or ".layers." not in name]
    optimizers = (
        torch.optim.Muon(inner, lr=LEARNING_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=LEARNING_RATE, betas=(0.9, 0.95)),
    )
    checkpoint, step = args.out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    if not args.export_only:
        train(model, optimizers, source, step, args.last_step, checkpoint)
    if args.export:
        export(model, source, args.export)
        shutil.copy(args.out / "train.log", args.export / "train.log")


def train(model: Qwen3, optimizers: tuple, source: Source, step: int, last_step: int, checkpoint: Path) -> None:
    log = checkpoint.with_name("train.log").open("a", encoding="utf-8")

    def say(line: str) -> None:
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    n_parameters = sum(p.numel() for p in model.parameters())
    say(
        f"step {step}: torch {torch.__version__}, python {sys.version.split()[0]}, seed {source.seed}, "
        f"{n_parameters} parameters, last step {last_step}"
    )
    started, loss_sum, heavy_sum, n_sum = time.monotonic(), 0.0, 0.0, 0
    while step < last_step:
        rate = min(1.0, (step + 1) / WARM_UP, 2 * (last_step - step) / last_step)
        loss, heavy = losses(model, rows_of(source, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * rate
            optimizer.step()
            optimizer.zero_grad()
        assert math.isfinite(loss.item()), f"loss {loss.item()} at step {step}"
        loss_sum, heavy_sum, n_sum, step = loss_sum + loss.item(), heavy_sum + heavy, n_sum + 1, step + 1
        if step % 50 == 0 or step == last_step:
            means = f"loss {loss_sum / n_sum:.3f} digits {heavy_sum / n_sum:.3f}"
            line = f"step {step} {time.monotonic() - started:.0f} s {means}"
            loss_sum, heavy_sum, n_sum = 0.0, 0.0, 0
            if step > SEGMENT_STEPS and step % 100 == 0:
                for n_facts, n_text in ((5, 200), (20, 2000))[: 1 if step < 1500 else 2]:
                    scores = [held_out_scores(model, source, i, n_facts, n_text) for i in range(60 // n_facts // 3)]
                    full, none, copy = (sum(column) for column in zip(*scores, strict=True))
                    n_asked = n_facts * len(scores)
                    line += (
                        f" | {n_text} tokens, {n_asked} asked: recall {100 * full / n_asked:.0f} % none"
                        f" {100 * none / n_asked:.0f} % copy NLL {copy / len(scores):.2f}"
                    )
            say(line)
        if step % 100 == 0 or step == last_step:
            state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


if __name__ == "__main__":
    main()
