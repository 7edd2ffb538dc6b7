"""``python -m onea``."""

from onea.cli import main

main()
