"""Client of a Tinker service: the Tinker SDK behind the protocols of `rlkit.service`.

Invariant: only this folder imports the Tinker SDK. Three places need the SDK itself: the server of `engine/` answers
with its types, `testing/` substitutes its classes, and the doctor in `tools/` tests it.
"""
