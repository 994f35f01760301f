"""`python -m expert_parallel`: the command `ep`."""

from expert_parallel.cli import main

main()
