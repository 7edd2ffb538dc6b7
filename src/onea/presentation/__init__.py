# SPDX-License-Identifier: Apache-2.0
"""Tables in every format, and one style for figures."""
