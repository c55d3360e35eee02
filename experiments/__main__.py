"""python -m experiments run | report"""

import sys

from npqwen.cli import guarded

USAGE = """usage: python -m experiments run [e0 e1 e2] [options]     run experiments, then report
       python -m experiments report DIR               tables and report.html of a folder of rows

examples:
  python -m experiments run                                  everything, on the embedded model
  python -m experiments run e2 --model Qwen/Qwen3-1.7B --texts 2
  python -m experiments run e2 --model DIR --arms sign:8 sign:32 lowrank32:128:16+ffit/8
  python -m experiments run --help"""


def main(argv: list[str]) -> int | None:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command == "run":
        from experiments.run import main as run

        return run(rest)
    if command == "report":
        from experiments.report import main as report

        return report(rest)
    helps = command in ("-h", "--help")
    print(USAGE if helps or not command else f"python -m experiments: {command!r} is no command (run, report)\n{USAGE}")
    return 0 if helps else 2


if __name__ == "__main__":
    sys.exit(guarded("python -m experiments", lambda: main(sys.argv[1:])))
