"""`python -m melodi` is the `melodi` command."""

from melodi.cli import main

main()
