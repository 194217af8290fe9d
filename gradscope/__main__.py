"""`python -m gradscope`: the command line."""

from gradscope.cli import main

if __name__ == "__main__":
    main()
