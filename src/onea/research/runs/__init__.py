# SPDX-License-Identifier: Apache-2.0
"""One run: a stream, a method and a seed in, a record out; it can stop at any moment and go on."""
