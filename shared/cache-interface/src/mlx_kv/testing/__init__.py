"""Checks that any registered method or combination must pass; needs the extra `testing` of mlx-kv."""
