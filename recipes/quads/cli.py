"""The command `quads`: finds the subcommand and hands the rest of the line to it. Imports nothing heavy itself."""

import importlib
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext

# name: (module with main(argv) -> exit status, what it does)
COMMANDS = {
    "demo": ("quads_recipe.demo", "train a small mixture-of-experts policy by GRPO and show how it went"),
    "report": ("quads_recipe.demo_report", "table and curves of a run, from the metrics file that verl wrote"),
    "study": ("quads_recipe.study.cli", "the paper's arms against each other over several seeds, with tests"),
    "diagnose": ("quads_recipe.diagnose", "where rollout and actor differ: by leg, layer and cause"),
    "doctor": ("quads_recipe.doctor", "check the installation and say which numeric path would run"),
    "make-policy": ("quads_recipe.policy.cli", "train the demo's policy from a seed"),
}

IN_PROCESS = ("diagnose",)
"""Those that load an engine themselves."""
WITH_RUNS = ("demo", "study")
"""Those whose engines are in other processes, each of which has a folder of its own in TMPDIR."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: quads COMMAND [options]", "", *lines, "", "`quads COMMAND --help` lists its options."])


def main(argv: list[str] | None = None) -> int:
    """Exit status of the subcommand; 2 if there is no such subcommand."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not argv or argv[0] not in COMMANDS:
        problem = f"unknown command {argv[0]!r}" if argv else "no command given"
        print(f"quads: {problem}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[argv[0]]
    with ExitStack() as stack:
        try:
            stack.enter_context(_temporary(argv[0]))
        except OSError as error:
            print(f"quads: TMPDIR: no folder can be made there ({error}); set it to another folder", file=sys.stderr)
            return 2
        return importlib.import_module(module).main(argv[1:])


def _temporary(command: str) -> AbstractContextManager:
    """What a command leaves in TMPDIR is removed with it. Before its modules are imported: torch settles where it keeps
    what it compiles when it is."""
    if command not in IN_PROCESS + WITH_RUNS:
        return nullcontext()
    from quads_recipe import scratch

    return scratch.as_tmpdir() if command in IN_PROCESS else scratch.compiled()


if __name__ == "__main__":
    sys.exit(main())
