# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and pages made from records alone."""
