"""`python -m dmsae` is `dmsae`."""

from dmsae.cli import main

if __name__ == "__main__":
    main()
