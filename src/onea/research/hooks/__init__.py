# SPDX-License-Identifier: Apache-2.0
"""What rival methods add to the frozen network: prompts, low-rank updates, scales, further adapters."""
