"""npqwen generate | chat | info | convert. A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from npqwen.errors import UserError

if TYPE_CHECKING:
    from npqwen.generation import Options, Row
    from npqwen.model import Model

MODEL_HELP = "'tiny' (ships inside the package), a checkpoint folder, or a hub id such as Qwen/Qwen3-0.6B"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 1 for a failure while computing, 2 for a user's mistake."""
    args = parser().parse_args(argv)
    return guarded("npqwen", lambda: args.run(args))


def guarded(program: str, run: Callable[[], int | None]) -> int:
    """Runs a command line's body: user errors, warnings and interrupts end as one line, not as a traceback."""
    warnings.showwarning = lambda message, *_, **__: print(f"{program}: warning: {message}", file=sys.stderr)
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):  # a pipe gets UTF-8 in any locale; a terminal that lacks a character shows "?"
            out.reconfigure(errors="replace") if out.isatty() else out.reconfigure(encoding="utf-8", errors="replace")
    try:
        return run() or 0
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, ChildProcessError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; Python would complain once more at exit
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="npqwen",
        description="Qwen3 and dense Qwen2/2.5 as NumPy and Numba arrays.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            '  npqwen generate --model Qwen/Qwen3-0.6B "The capital of France is"\n'
            "  npqwen chat --model ./my-checkpoint --no-thinking\n"
            "  npqwen convert model-q4_k_m.gguf ./my-checkpoint\n"
        ),
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    generate = _command(commands, "generate", run_generate, "continue a text, exactly as given (no chat template)")
    generate.add_argument("prompt", nargs="?", help="the text; without it, or with -, it is read from standard input")
    add_model(generate)
    _add_sampling(generate, max_new_tokens=64)
    generate.add_argument("--ids", action="store_true", help="print token ids instead of text")
    generate.add_argument("--profile", action="store_true", help="print each stage's share of the time on stderr")
    generate.epilog = (
        'examples:\n  npqwen generate "Once upon a time" --max-new-tokens 40\n'
        "  cat text.txt | npqwen generate --model DIR --temperature 0.7 --top-p 0.9 --seed 1\n"
        '  npqwen generate --model DIR --stop "\\n\\n" "A list:"'
    )

    chat = _command(commands, "chat", run_chat, "talk to a model through its own chat template")
    add_model(chat)
    _add_sampling(chat, max_new_tokens=1024)
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--message", help="one message: print the answer and leave")
    chat.add_argument("--no-thinking", dest="thinking", action="store_false", help="the template's non-thinking mode")
    chat.epilog = (
        "Sampling defaults to the checkpoint's generation_config.json.\n"
        'examples:\n  npqwen chat --model Qwen/Qwen3-0.6B\n  npqwen chat --model DIR --message "Hi" --no-thinking'
    )

    info = _command(commands, "info", run_info, "print what a checkpoint is, without computing anything")
    add_model(info)
    info.epilog = "example:\n  npqwen info --model Qwen/Qwen3-0.6B"

    convert = _command(commands, "convert", run_convert, "turn a GGUF file into a checkpoint folder")
    convert.add_argument("gguf", help="the GGUF file (Qwen2 or Qwen3, any quantisation that the gguf package reads)")
    convert.add_argument("folder", help="the folder to make")
    convert.epilog = "example:\n  npqwen convert qwen3-0.6b-q8_0.gguf ./qwen3-0.6b"
    return top


def _command(commands, name: str, run: Callable, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(run=run)
    return command


def add_model(command: argparse.ArgumentParser) -> None:
    """The options that say which checkpoint is opened, and how: the same in every command."""
    command.add_argument("--model", default="tiny", help=f"{MODEL_HELP} (default: tiny)")
    command.add_argument("--revision", help="branch, tag or commit of a hub id")
    command.add_argument("--kernels", default="auto", choices=["auto", "numba", "numpy"], help="default: auto (numba)")


def _add_sampling(command: argparse.ArgumentParser, max_new_tokens: int) -> None:
    command.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"default: {max_new_tokens}")
    command.add_argument("--temperature", type=float, help="0 is greedy")
    command.add_argument("--top-k", type=int, help="keep the k most likely tokens (0: all)")
    command.add_argument("--top-p", type=float, help="keep the most likely tokens that reach this probability")
    command.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 avoids tokens seen before")
    command.add_argument("--seed", type=int, help="for the same text again; drawn and printed if not given")
    command.add_argument(
        "--stop", action="append", default=[], help="end before this text (may be given several times)"
    )
    command.add_argument("--stats", action="store_true", help="print times and the reason for the end on stderr")


def _options(args: argparse.Namespace, defaults: dict[str, float]) -> Options:
    from npqwen.generation import Options

    def pick(name: str, fallback: float) -> float:
        given = getattr(args, name)
        return defaults.get(name, fallback) if given is None else given

    stops = tuple(stop.encode().decode("unicode_escape") if "\\" in stop else stop for stop in args.stop)
    return Options(
        args.max_new_tokens,
        float(pick("temperature", 0.0)),
        int(pick("top_k", 0)),
        float(pick("top_p", 1.0)),
        args.repetition_penalty,
        stops,
    )


def run_generate(args: argparse.Namespace) -> None:
    from npqwen import load
    from npqwen.generation import new_rows
    from npqwen.tokenizer import no_tokenizer

    prompt = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    options = _options(args, {})
    model = load(args.model, revision=args.revision, kernels=args.kernels)
    if model.tokenizer is None:
        raise no_tokenizer(model.folder)
    rows = new_rows(model, [model.tokenizer.encode(prompt)], options, args.seed)
    if not args.profile:
        _write(model, rows, options, args)
        return
    from npqwen.generation import generate
    from npqwen.profile import Profile

    profile = Profile(model)
    list(generate(profile.model, rows[0].prompt, min(2, options.max_new_tokens)))
    profile.start()
    _write(profile.model, rows, options, args)
    profile.end()
    print(profile.table(len(rows[0].prompt), len(rows[0].ids)), file=sys.stderr)


def _write(model: Model, rows: list[Row], options: Options, args: argparse.Namespace) -> None:
    """Streams one row to standard output, and what it was made with to stderr."""
    from npqwen.generation import stream

    start = time.perf_counter()
    first = None
    for _, ids, text in stream(model, rows, options):
        first = first or time.perf_counter()
        if getattr(args, "ids", False):
            print(*ids, sep="\n", flush=True)
        else:
            print(text, end="", flush=True)
    if not getattr(args, "ids", False):
        print()
    row, end = rows[0], time.perf_counter()
    if options.temperature > 0 and args.seed is None:
        print(f"npqwen: seed {row.seed}", file=sys.stderr)
    if args.stats:
        why = f"{row.finish} (id {row.ended_by})" if row.ended_by is not None else row.finish
        to_first = (first or end) - start
        rate = (len(row.ids) - 1) / (end - first) if first and len(row.ids) > 1 else 0.0
        print(
            f"npqwen: {len(row.prompt)} prompt tokens, first text after {to_first:.2f} s, {len(row.ids)} new tokens, "
            f"then {rate:.1f} tokens/s, ended by {why}",
            file=sys.stderr,
        )


def run_chat(args: argparse.Namespace) -> None:
    from npqwen import load
    from npqwen.chat import encode_chat, split_thinking
    from npqwen.generation import new_rows
    from npqwen.tokenizer import no_tokenizer

    model = load(args.model, revision=args.revision, kernels=args.kernels)
    if model.tokenizer is None:
        raise no_tokenizer(model.folder)
    options = _options(args, model.sampling)
    if args.thinking and options.temperature == 0 and "<think>" in model.tokenizer.added.values():
        warnings.warn("greedy thinking tends to repeat itself until the cap; --temperature 0.6 is usual", stacklevel=2)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        content = args.message
        if content is None:
            try:
                content = input("> ")
            except EOFError:
                print()
                return
        if not content.strip():
            continue
        messages.append({"role": "user", "content": content})
        rows = new_rows(model, [encode_chat(model.tokenizer, messages, thinking=args.thinking)], options, args.seed)
        _write(model, rows, options, args)
        _, answer, closed = split_thinking(model.tokenizer, rows[0].ids, rows[0].prompt.tolist())
        if not closed:
            print("npqwen: the cap came before the end of its thinking (--max-new-tokens)", file=sys.stderr)
        messages.append({"role": "assistant", "content": model.tokenizer.decode(answer)})
        if args.message is not None:
            return


def run_info(args: argparse.Namespace) -> None:
    from npqwen import load

    model = load(args.model, revision=args.revision, kernels="numpy")
    c, w = model.config, model.weights
    bf16 = "bf16" if w.embed.dtype.name == "uint16" else w.embed.dtype.name
    windows = sorted({window for window in c.windows if window is not None})
    lines = {
        "model": f"{c.model_type}, {model.folder}" + (f" at {model.revision}" if model.revision else ""),
        "weights": f"{w.nbytes / 1e6:,.1f} MB, {bf16}, {len(w.files)} file{'s' * (len(w.files) > 1)}",
        "layers": f"{c.n_layers}"
        + (f", {sum(x is not None for x in c.windows)} sliding over {windows}" if windows else ""),
        "hidden": f"{c.hidden}, mlp {c.mlp_width}, vocabulary {c.vocab_size}, {'tied' if c.tied else 'untied'}",
        "attention": f"{c.n_heads} query heads, {c.n_kv_heads} kv heads, head_dim {c.head_dim}",
        "positions": f"{c.max_position}, {c.rope.rope_type} RoPE, theta {c.rope.theta:g}",
        "KV cache": f"{2 * c.n_layers * c.n_kv_heads * c.head_dim * 4:,} bytes per token (float32)",
        "end ids": ", ".join(f"{i}" for i in model.eos_ids) or "none",
        "tokenizer": "yes" if model.tokenizer else "none",
        "sha256": w.sha256(),
    }
    for name, value in lines.items():
        print(f"{name:10} {value}")


def run_convert(args: argparse.Namespace) -> None:
    from pathlib import Path

    from npqwen.convert import convert

    convert(Path(args.gguf), Path(args.folder))
    print(args.folder)


if __name__ == "__main__":
    sys.exit(main())
