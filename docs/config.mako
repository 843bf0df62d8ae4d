<%!
    # Settings of the generated reference: pdoc --template-dir docs --html infinibatch
    sort_identifiers = False  # modules are ordered by family
    list_class_variables_in_index = False
    show_inherited_members = False
    show_type_annotations = True
    show_source_code = True
    latex_math = False
%>
