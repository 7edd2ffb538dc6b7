# SPDX-License-Identifier: Apache-2.0
"""Storage: model folders, their validation, the model card and the Hugging Face Hub."""
