"""`python -m mlx_kv_cli` is the command `mlx_kv`."""

from mlx_kv_cli.main import main

main()
