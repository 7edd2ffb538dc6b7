# SPDX-License-Identifier: Apache-2.0
"""Published datasets by name, and images packed for runs."""
