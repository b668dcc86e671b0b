"""Client of a Tinker service: the Tinker SDK behind the protocols of `rlkit.service`.

Invariant: a run imports the Tinker SDK only here. Elsewhere only four places do, which need the SDK itself: the server
of `engine/` answers with its types, `testing/` substitutes its classes, the doctor in `tools/` tests it, and
`conformance/` tests services through it.
"""
