"""Attention over rows that a layout holds in another basis."""

import mlx.core as mx

from mlx_kv import DenseStore, attention
from mlx_kv.layout import Basis


class TurnedStore(DenseStore):
    """Keys held times a matrix, values times another."""

    key_turn, value_turn = (
        mx.linalg.qr(mx.random.normal((64, 64), key=mx.random.key(i)), stream=mx.cpu)[0] for i in (8, 9)
    )

    def layout(self):
        def dense():
            keys, values = self.dense()
            return keys @ self.key_turn, values @ self.value_turn

        basis = Basis(lambda q: q @ self.key_turn, lambda out: out @ self.value_turn.T)
        return super().layout()._replace(dense=dense, basis=basis)


class DenseAttention:
    """A backend that reads what the layout reads as."""

    @staticmethod
    def attend(queries, layout, scale, sinks, logits):
        keys, values = layout.dense()
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale), queries @ keys.swapaxes(2, 3)


def test_queries_enter_the_basis_and_outputs_leave_it(monkeypatch):
    monkeypatch.setattr(attention, "_backends", lambda: {"dense": DenseAttention})
    store = TurnedStore()
    queries, keys, values = (mx.random.normal((1, 2, n, 64), key=mx.random.key(i)) for i, n in enumerate((1, 50, 50)))
    store.append(keys, values)
    output, logits = attention.decode(store, queries, 0.125, logits=True)
    # Sums in another order.
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.125)
    assert mx.allclose(output, expected, atol=1e-5)
    assert mx.allclose(logits, queries @ keys.swapaxes(2, 3), atol=1e-4)
