"""The command line: flags into a dataclass, then one call. ``docs/cli.md`` is the printed help of every command.

No torch is imported before a command needs it: ``--help`` and mistakes in flags are answered at once.
"""

import argparse
import difflib
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from lampejo import __version__
from lampejo.cli_flags import add_answer_flags, add_bench_flags, add_model_flags, add_plan_flags, add_serve_flags
from lampejo.cli_streams import check_stdin, give_up_broken_streams, mend_streams, tell
from lampejo.errors import DamagedModel, UserError, why
from lampejo.weights.aliases import ALIASES, DEFAULT

INTERRUPTED, BROKEN_PIPE, USER_MISTAKE = 130, 141, 2  # exit codes; the first two are 128 and the signal's number
COLORS = ("always", "auto", "never")


class Parser(argparse.ArgumentParser):
    """Mistakes in flags are told like all others, with the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:].rstrip('.')}.", f"See '{self.prog} --help'.")

    @property
    def commands(self) -> dict[str, "Parser"]:
        """The parsers of the commands by name."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return actions[0].choices if actions else {}

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """``parse_args``; a flag that is not known is answered with the one that was probably meant."""
        if argv and argv[0].startswith("-") and argv[0] not in self._option_string_actions:
            raise UserError(f"Unknown flag {argv[0]} before the command.", f"See '{self.prog} --help'.")
        parsed, unknown = self.parse_known_args(argv)
        if unknown:
            parsed.parser.refuse(unknown[0])
        return parsed

    def refuse(self, argument: str) -> NoReturn:
        """``argument`` belongs to nothing that this command knows."""
        if not argument.startswith("-"):
            raise UserError(
                f"{argument!r} is one argument too many.",
                f"Put a text with spaces between quotes; see '{self.prog} --help'.",
            )
        flag = argument.partition("=")[0]
        close = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)  # "--" is in common
        raise UserError(f"Unknown flag {flag}.", f"Did you mean {close[0]}?" if close else f"See '{self.prog} --help'.")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def make_parser() -> Parser:
    parser = Parser(
        prog="lampejo",
        usage="lampejo COMMAND ...",
        description="Open language models faster, with exactly the same output.",
        epilog="""Try: lampejo generate "Write a haiku about the sea". More: lampejo COMMAND --help.""",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lampejo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog="lampejo")
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_pull(commands)
    _add_inspect(commands)
    _add_bench(commands)
    _add_plan(commands)
    _add_top(commands)
    return parser


def _add_command(commands: Commands, name: str, usage: str, text: str, epilog: str) -> Parser:
    """A command with its help; the usage line is written out, since argparse would list every flag in it."""
    parser = commands.add_parser(
        name,
        help=text,
        usage=f"lampejo {name} {usage}",
        description=text[:1].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    return parser


GENERATE_EXAMPLES = """examples:
  lampejo generate "Write a haiku about the sea"
  lampejo generate --raw --max-tokens 64 "def fibonacci(n):"
  lampejo generate --temperature 0.8 --top-p 0.95 --seed 7 "Tell me a story"
  lampejo generate --show-drafts "Count from one to twenty"
  lampejo generate --compare "Write a haiku about the sea"
  cat letter.txt | lampejo generate --system "Answer in one sentence" --json -
"""


def _add_generate(commands: Commands) -> None:
    parser = _add_command(commands, "generate", "[flags] PROMPT", "answer one prompt", GENERATE_EXAMPLES)
    parser.set_defaults(run=_generate)
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    group.add_argument("--show-drafts", action="store_true", help="colour the tokens by who proposed them")
    group.add_argument(
        "--compare", action="store_true", help="answer plain and with drafts; exit code 1 if they differ"
    )
    group.add_argument("--color", choices=COLORS, default="auto", help="colours of --show-drafts (default: auto)")
    add_model_flags(parser)
    add_answer_flags(parser)


def _generate(args: argparse.Namespace) -> int:
    from lampejo.cli_generate import GenerateOptions, compare, generate
    from lampejo.cli_options import answer_params, model_options

    options = GenerateOptions(
        text=_text(args.prompt),
        model=model_options(args),
        params=answer_params(args),
        system=args.system,
        raw=args.raw,
        as_json=args.json,
        show_drafts=args.show_drafts,
        compare=args.compare,
        color=args.color,
    )
    return compare(options) if options.compare else generate(options)


def _text(prompt: str) -> str:
    try:
        if prompt == "-":
            check_stdin()
            return sys.stdin.buffer.read().decode()
        prompt.encode()
    except UnicodeError:
        raise UserError("The prompt is not UTF-8 text.", "Convert it, for example with iconv.") from None
    return prompt


CHAT_EXAMPLES = """/help lists the chat's own commands. Ctrl-C stops an answer; at the prompt it ends the chat.

examples:
  lampejo chat
  lampejo chat --system "You are a patient teacher" --temperature 0.7
  lampejo chat --model qwen2.5-coder-1.5b --context 8192
"""


def _add_chat(commands: Commands) -> None:
    parser = _add_command(commands, "chat", "[flags]", "talk with a model", CHAT_EXAMPLES)
    parser.set_defaults(run=_chat)
    parser.add_argument("--system", metavar="TEXT", help="a system message that stays before all turns")
    add_model_flags(parser)
    add_answer_flags(parser, with_logprobs=False)


def _chat(args: argparse.Namespace) -> int:
    check_stdin()
    from lampejo.chat_session import chat
    from lampejo.cli_options import answer_params, model_options

    return chat(model_options(args), answer_params(args), args.system)


SERVE_EXAMPLES = """OpenAI's clients go to http://127.0.0.1:8000/v1; people and Anthropic's clients to http://127.0.0.1:8000.

examples:
  lampejo serve
  lampejo serve qwen2.5-coder-1.5b --context 16384 --name coder
  lampejo serve --host 0.0.0.0 --api-key-file keys.txt --access-log
"""


def _add_serve(commands: Commands) -> None:
    text = "serve a model over HTTP, as OpenAI and Anthropic do, with a chat page"
    parser = _add_command(commands, "serve", "[flags] [MODEL]", text, SERVE_EXAMPLES)
    parser.set_defaults(run=_serve)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=DEFAULT, help=f"alias, org/name, folder or .gguf file ({DEFAULT})"
    )
    add_serve_flags(parser)
    add_model_flags(parser, with_model=False)


def _serve(args: argparse.Namespace) -> int:
    from lampejo.server.config import Security, ServerConfig
    from lampejo.server.security import find_keys

    typed = () if Path(args.model).exists() else (args.model,)  # a path of this machine is nobody else's business
    security = Security(find_keys(args.api_key or (), args.api_key_file), tuple(args.cors or ()), args.insecure)
    server = ServerConfig(
        host=args.host,
        port=args.port,
        names=(*(args.name or ()), *typed),
        max_queue=args.max_queue,
        timeout_s=args.timeout,
        grace_s=args.grace,
        vllm_metrics=args.metrics_compat == "vllm",
        security=security,
    )
    from lampejo.cli_options import model_options
    from lampejo.cli_serve import ServeOptions, serve

    return serve(ServeOptions(model_options(args), server, args.allow_plain, args.access_log))


PULL_EXAMPLES = f"""What is there already is not fetched again; an interrupted pull goes on where it stopped.
The cache is the folder LAMPEJO_CACHE, else this platform's own. Aliases: {", ".join(ALIASES)}.

examples:
  lampejo pull smollm2
  lampejo pull Qwen/Qwen2.5-0.5B-Instruct
  lampejo pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf
"""


def _add_pull(commands: Commands) -> None:
    parser = _add_command(commands, "pull", "MODEL", "fetch a model into the cache", PULL_EXAMPLES)
    parser.set_defaults(run=_pull)
    parser.add_argument("model", metavar="MODEL", help="alias, org/name, org/name@revision or org/name:file.gguf")


def _pull(args: argparse.Namespace) -> int:
    from lampejo.weights.store import pull

    print(pull(args.model))
    return 0


INSPECT_EXAMPLES = """examples:
  lampejo inspect smollm2
  lampejo inspect --json ./my-model
"""


def _add_inspect(commands: Commands) -> None:
    text = "tell what a model is: architecture, sizes, quantization, chat template, drafters"
    parser = _add_command(commands, "inspect", "[flags] MODEL", text, INSPECT_EXAMPLES)
    parser.set_defaults(run=_inspect)
    parser.add_argument("model", metavar="MODEL", help="alias, org/name, folder or .gguf file; fetched if need be")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(args: argparse.Namespace) -> int:
    from lampejo.cli_inspect import inspect

    return inspect(args.model, args.json)


BENCH_EXAMPLES = """The arms answer every prompt in turn, on one loaded model; each answer has to equal that of plain
decoding. Exit code 1 if any request failed or differed. --suite quick takes about a minute on the default model.

examples:
  lampejo bench
  lampejo bench --suite full --peer llama.cpp --report report.html
  lampejo bench --arms auto --categories editing,code --runs 3
  lampejo bench --model qwen2.5-coder-1.5b --sections peers --peer llama.cpp
  lampejo bench --synthetic-acceptance 0.8,0.7,0.6 --json
"""


def _add_bench(commands: Commands) -> None:
    text = "measure plain decoding and drafts, beside other engines if asked"
    parser = _add_command(commands, "bench", "[flags]", text, BENCH_EXAMPLES)
    parser.set_defaults(run=_bench)
    add_bench_flags(parser)
    add_model_flags(parser)


def _bench(args: argparse.Namespace) -> int:
    from lampejo.cli_bench import bench, bench_options

    return bench(bench_options(args))


PLAN_EXAMPLES = """Nothing is loaded but the model's configuration. The speeds are computed, not measured: the limit of
the hardware, and what a good engine should reach of it. docs/plan.md tells how.

examples:
  lampejo plan Qwen/Qwen3.5-122B-A10B --gpu b200
  lampejo plan Qwen/Qwen3.5-35B-A3B --gpu h200 --precision fp8 --concurrency 16 --context 32768
  lampejo plan Qwen/Qwen3-8B --gpu rtx4090 --acceptance-length 5.5 --json
  lampejo plan smollm2 --cpu
"""


def _add_plan(commands: Commands) -> None:
    text = "tell from a model's configuration what fits on a device and how fast it can be"
    parser = _add_command(commands, "plan", "[flags] MODEL", text, PLAN_EXAMPLES)
    parser.set_defaults(run=_plan)
    parser.add_argument("model", metavar="MODEL", help="alias, org/name, folder or .gguf file; weights are not fetched")
    add_plan_flags(parser)


def _plan(args: argparse.Namespace) -> int:
    from lampejo.cli_plan import plan, plan_options

    return plan(plan_options(args))


TOP_EXAMPLES = """In a terminal the view is live, and Ctrl-C ends it; through a pipe it is one snapshot.

examples:
  lampejo top
  lampejo top http://192.168.1.5:8000 --interval 5
  lampejo top --once | head -20
"""


def _add_top(commands: Commands) -> None:
    text = "watch a running server: speed, acceptance, times, cache"
    parser = _add_command(commands, "top", "[flags] [URL]", text, TOP_EXAMPLES)
    parser.set_defaults(run=_top)
    address = "http://127.0.0.1:8000"
    parser.add_argument("url", metavar="URL", nargs="?", default=address, help=f"of the server (default: {address})")
    parser.add_argument("--api-key", metavar="KEY", help="if the server wants one (default: LAMPEJO_API_KEY)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one snapshot")


def _top(args: argparse.Namespace) -> int:
    from lampejo.cli_top import top, top_options

    return top(top_options(args.url, args.api_key, args.interval, args.once))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. The user's mistakes become one line, without a traceback."""
    mend_streams()
    gc.set_threshold(100_000)  # imports and loading make a million objects that stay: looking through them takes 0.3 s
    try:
        _check_folder()
        args = make_parser().parse(sys.argv[1:] if argv is None else argv)
        if args.run is not _top:  # which needs no PyTorch
            import numpy  # noqa: F401  # PyTorch would lose a Ctrl-C that comes while it imports this

        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (UserError, DamagedModel) as error:
        tell(f"lampejo: {' '.join(str(error).split())}")
        return USER_MISTAKE
    except KeyboardInterrupt:
        tell("")
        return INTERRUPTED
    except BrokenPipeError:  # what reads our output has gone
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is not None:  # of a file, which is told where it is opened
            raise
        tell(f"lampejo: input or output failed: {why(error)}. Look where they are redirected to.")
        return USER_MISTAKE
    finally:
        give_up_broken_streams()


def _check_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("The current folder does not exist any more.", "Change to one that does.") from None
