"""`python -m gradscope`: the command line."""

from gradscope.cli import run_script

if __name__ == "__main__":
    run_script()
