"""The console script and `python -m gradscope`."""


def run() -> None:
    """Run the command that was asked for."""
    try:
        from gradscope.cli import run_script
    except KeyboardInterrupt:  # before anything began
        raise SystemExit(130) from None
    run_script()


if __name__ == "__main__":
    run()
