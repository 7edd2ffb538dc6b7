# SPDX-License-Identifier: Apache-2.0
"""The frozen vision transformer, what can be plugged into it, and the heads that read it."""
