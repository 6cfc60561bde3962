"""The command line: flags into a dataclass, then one call. ``docs/cli.md`` is the printed help of every command."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lampejo.cli_flags import add_answer_flags, add_model_flags, answer_params, model_options
from lampejo.cli_generate import GenerateOptions, compare, generate
from lampejo.errors import UserError

INTERRUPTED, BROKEN_PIPE, USER_MISTAKE = 130, 141, 2  # exit codes; the first two are 128 and the signal's number


class Parser(argparse.ArgumentParser):
    """Mistakes in flags are told like all others, with the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:].rstrip('.')}.", f"See '{self.prog} --help'.")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        for argument in unknown:
            flag = argument.partition("=")[0]
            close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            if flag.startswith("-"):
                remedy = f"Did you mean {close[0]}?" if close else f"See '{self.prog} --help'."
                raise UserError(f"Unknown flag {flag}.", remedy)
            raise UserError(f"{argument!r} is one argument too many.", "Put a text with spaces between quotes.")


def make_parser() -> Parser:
    parser = Parser(
        prog="lampejo",
        usage="lampejo COMMAND ...",
        description="Open language models several times faster, with exactly the same output.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_generate(commands)
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[Parser]", name: str, usage: str, text: str, epilog: str
) -> Parser:
    return commands.add_parser(
        name,
        help=text,
        usage=f"lampejo {name} {usage}",
        description=text[:1].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


GENERATE_EXAMPLES = """examples:
  lampejo generate "Write a haiku about the sea"
  lampejo generate --raw --max-tokens 64 "def fibonacci(n):"
  lampejo generate --temperature 0.8 --top-p 0.95 --seed 7 "Tell me a story"
  lampejo generate --show-drafts "Count from one to twenty"
  lampejo generate --compare "Write a haiku about the sea"
  cat letter.txt | lampejo generate --system "Answer in one sentence" --json -
"""


def _add_generate(commands: "argparse._SubParsersAction[Parser]") -> None:
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
    group.add_argument(
        "--color", choices=["always", "auto", "never"], default="auto", help="of --show-drafts (default: auto)"
    )
    add_model_flags(parser)
    add_answer_flags(parser)


def _generate(args: argparse.Namespace) -> int:
    model, params = model_options(args), answer_params(args)
    options = GenerateOptions(
        text=_text(args.prompt),
        model=model,
        params=params,
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
            return sys.stdin.buffer.read().decode()
        prompt.encode()
    except UnicodeError:
        raise UserError("The prompt is not UTF-8 text.", "Convert it, for example with iconv.") from None
    return prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. The user's mistakes become one line, without a traceback."""
    try:
        parser = make_parser()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            command = parser._subparsers._group_actions[0].choices[args.command]  # type: ignore[union-attr,index]
            command.refuse_unknown(unknown)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"lampejo: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # what reads our output has gone; Python would complain once more at its own end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
