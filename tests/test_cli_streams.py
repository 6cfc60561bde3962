"""The command line as a process: Ctrl-C, pipes, streams that are closed, full, or not in UTF-8."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from lampejo.cli import BROKEN_PIPE, INTERRUPTED, USER_MISTAKE
from test_cli import assert_one_line

unix_only = pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of Unix")


@unix_only
def test_ctrl_c_ends_a_running_answer_cleanly():
    """Fault: a traceback, a hang at exit, or exit code 0 for half an answer."""
    # The handler of a terminal's job, also where these tests run in the background, which ignores Ctrl-C.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    start += "from lampejo.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "generate", "--raw", "--ignore-eos", "--max-tokens", "4000", "One two"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        guard = threading.Timer(120, process.kill)
        guard.start()
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        guard.cancel()
    assert process.returncode == INTERRUPTED, err
    assert b"Traceback" not in err


def test_numpy_is_imported_before_pytorch_does_it():
    """Fault: PyTorch swallows a Ctrl-C that comes while it imports numpy, and the answer goes on."""
    program = """
        import sys
        from lampejo import cli
        cli._inspect = lambda args: print("numpy" in sys.modules, "torch" in sys.modules)
        cli.main(["inspect", "smollm2"])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True False\n"


def test_top_imports_neither():
    """Fault: a look at a server waits for what only models need."""
    program = """
        import sys
        from lampejo import cli, cli_top
        cli_top.top = lambda options: print("numpy" in sys.modules, "torch" in sys.modules)
        cli.main(["top", "--once"])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False\n"


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``line`` by a shell; ``$L`` is the command under test."""
    environment = {**os.environ, "L": f"{sys.executable} -m lampejo", **variables}
    return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=120)


@unix_only
@pytest.mark.parametrize("line", ["$L generate - <&-", "$L chat <&-"])
def test_a_closed_input_is_told_in_one_line(line):
    """Fault: a traceback from a job without a standard input."""
    done = shell(line)
    assert_one_line(done.returncode, done.stdout, done.stderr, "standard input is closed")


@unix_only
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_swallows_what_is_written(closed):
    """Fault: a traceback from a job without standard streams, or the statistics among the answer."""
    done = shell(f"$L inspect smollm2 {closed}")
    assert done.returncode == 0 and done.stderr == "" and ("architecture" in done.stdout) == (closed == "2>&-")
    done = shell(f"$L inspect {closed}")
    assert done.returncode == USER_MISTAKE and done.stdout == "" and "Traceback" not in done.stderr


@unix_only
@pytest.mark.parametrize("command", ["generate hi", "inspect smollm2", "pull smollm2"])
def test_a_current_folder_that_was_removed_is_told_in_one_line(command, tmp_path):
    """Fault: a traceback from whatever asks first where we are."""
    gone = tmp_path / "gone"
    done = shell(f"mkdir '{gone}' && cd '{gone}' && rmdir '{gone}' && exec $L {command}")
    assert_one_line(done.returncode, done.stdout, done.stderr, "does not exist any more", "Change to one")


@unix_only
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_is_not_utf8_shows_what_it_can(encoding):
    """Fault: UnicodeEncodeError in the middle of an answer."""
    says = "import sys, lampejo.cli as c; c._pull = lambda args: print('a漢字b') or 0; sys.exit(c.main(['pull', 'x']))"
    done = shell(f'{sys.executable} -c "{says}"', PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a??b\n", "")
    done = shell("$L pull ./漢字.gguf", PYTHONIOENCODING=encoding)
    assert_one_line(done.returncode, done.stdout, done.stderr, "does not exist")


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("line", ["$L inspect smollm2 >/dev/full", "$L generate --raw --max-tokens 2 hi >/dev/full"])
def test_a_full_disk_under_the_output_is_told_in_one_line(line):
    """Fault: a traceback, or exit code 0 for an answer that nobody has."""
    done = shell(line)
    told = [line for line in done.stderr.splitlines(True) if "several times slower" not in line]
    assert_one_line(done.returncode, done.stdout, "".join(told), "No space left")
    assert shell(f"{line} 2>&1").returncode == USER_MISTAKE  # not 120, which Python makes of it


@unix_only
def test_a_reader_that_goes_away_is_no_error():
    """Fault: BrokenPipeError on the screen after ``lampejo ... | head``."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "lampejo", "inspect", "smollm2"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, b"")
