"""The network, in Flax NNX: one decoder whose features are chosen by data.

Shape letters used everywhere in jpd:
B batch, T query tokens, S key/value tokens, N query heads, K kv heads, G = N/K query heads of one
kv head, H head_dim, D embed_dim, F mlp_dim, V vocab, L layers, P pages, p page_size, E experts,
W page-table width.
"""
