"""The command `mlx_kv`, and the quality measurements behind it as functions.

`mlx_kv_cli.perplexity` and `mlx_kv_cli.passkey` are for programs too. Importing this package imports nothing else, so
that `mlx_kv_cli.blas` can run before mlx is loaded.
"""
