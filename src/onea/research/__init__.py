# SPDX-License-Identifier: Apache-2.0
"""Class-incremental learning as research: methods, streams, runs, records and reports."""
